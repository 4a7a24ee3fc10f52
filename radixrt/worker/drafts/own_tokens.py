"""The tokens that a head's vocabulary lacks and the last texts of a cache root have had: names, words
of other languages, control tokens. They may come again, so the head drafts these too.

What other roots have had must not be seen in the time that an answer takes.
"""

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from radixrt.models.draft_vocabulary import CopiedRows

MAX_OWN = 2048
"""Tokens of one root: those met last."""


class OwnTokens:
    """Those of one root. Their rows of the LM head are read before they are used.

    Args:
        first: the lowest id that the head's vocabulary lacks.
        rows: MAX_OWN of them.
    """

    def __init__(self, first: int, rows: CopiedRows) -> None:
        self.token_ids: list[int] = []
        """By place in the matrix."""
        self._first = first
        self._rows = rows
        self._places: OrderedDict[int, int] = OrderedDict()
        """Of each token; that met last comes last."""
        self._new: dict[int, None] = {}
        """Tokens without rows yet."""

    def note(self, token_ids: Iterable[int]) -> None:
        """A text goes on with these."""
        for token in token_ids:
            if token < self._first:
                continue
            if token in self._places:
                self._places.move_to_end(token)
            else:
                self._new.pop(token, None)
                self._new[token] = None

    def scores(self, hidden: Tensor) -> Tensor | None:
        """Logits [rows, len(token_ids)] behind states [rows, hidden_size]; None: there are no such
        tokens."""
        if self._new:
            self._read()
        return self._rows.logits(hidden)[:, : len(self.token_ids)] if self.token_ids else None

    def _read(self) -> None:
        new = list(self._new)[-MAX_OWN:]
        self._new.clear()
        for token in new:
            if len(self.token_ids) < MAX_OWN:
                self._places[token] = len(self.token_ids)
                self.token_ids.append(token)
            else:
                _, place = self._places.popitem(last=False)
                self._places[token], self.token_ids[place] = place, token
        places = [self._places[token] for token in new]
        self._rows.copy(torch.tensor(new), torch.tensor(places))
