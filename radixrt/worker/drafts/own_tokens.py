"""The tokens that a head's vocabulary lacks and the last texts of a cache root have had: names, words
of other languages, control tokens. They may come again, so the head drafts these too.

What other roots have had must not be seen in the time that an answer takes.

A row of the LM head takes some 50 µs to copy, and all sequences wait meanwhile. So rows are copied
when a draft needs them, few at a time, and their memory is taken in pieces.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds
from radixrt.models.draft_vocabulary import PIECE, CopiedRows
from radixrt.models.head_files import OWN_IDS
from radixrt.worker.drafts.drafters import keep_last

MAX_OWN = 2048
"""Tokens of one root: those met last."""

MAX_READ = 64
"""Rows that are copied for the drafts of a step, of all roots together."""

MAX_NOTED = 8192
"""Such tokens of a prompt that are noted, its last ones: all sequences wait here too."""

Owner = CacheRoot | int
"""A cache root; or the slot of a sequence without one, whose tokens are its own."""


class OwnTokens:
    """Those of one root.

    Args:
        first: the lowest id that the head's vocabulary lacks.
        new_piece: makes a matrix of PIECE rows.
    """

    def __init__(self, first: int, new_piece: Callable[[], CopiedRows]) -> None:
        self.token_ids: list[int] = []
        """By row of the pieces."""
        self.pieces: list[CopiedRows] = []
        self._first = first
        self._new_piece = new_piece
        self._rows: OrderedDict[int, int | None] = OrderedDict()
        """The row of each token, that met last at the end; None: it has none yet."""
        self._unread: OrderedDict[int, None] = OrderedDict()
        """Tokens without a row, that met last at the end."""
        self._free: list[int] = []
        """Rows of tokens that were met too long ago."""

    def note(self, token_ids: Iterable[int]) -> None:
        """A text goes on with these."""
        for token in token_ids:
            if token < self._first:
                continue
            row = self._rows.pop(token, None)
            self._rows[token] = row
            if row is None:
                self._unread[token] = None
                self._unread.move_to_end(token)
            if len(self._rows) > MAX_OWN:
                oldest, row = self._rows.popitem(last=False)
                self._unread.pop(oldest, None)
                if row is not None:
                    self._free.append(row)

    @property
    def num_unread(self) -> int:
        """Tokens that can't be drafted yet."""
        return len(self._unread)

    def read(self, most: int) -> int:
        """Copy up to ``most`` rows, of the tokens met last; returns how many."""
        new = [self._unread.popitem()[0] for _ in range(min(most, len(self._unread)))]
        by_piece: dict[int, list[tuple[int, int]]] = {}
        for token in new:
            row = self._free.pop() if self._free else len(self.token_ids)
            self.token_ids[row : row + 1] = [token]
            self._rows[token] = row
            by_piece.setdefault(row // PIECE, []).append((token, row % PIECE))
        for piece, rows in by_piece.items():
            if piece == len(self.pieces):
                self.pieces.append(self._new_piece())
            tokens, places = torch.tensor(rows).T.contiguous()
            self.pieces[piece].copy(tokens, places)
        return len(new)

    def scores(self, hidden: Tensor) -> Tensor | None:
        """Logits [rows, len(token_ids)] behind states [rows, hidden_size]; None: there are no such
        tokens."""
        if not self.token_ids:
            return None
        scores = [piece.logits(hidden) for piece in self.pieces]
        return torch.cat(scores, dim=1)[:, : len(self.token_ids)]


class AllOwnTokens:
    """Those of all roots: at most OWN_IDS rows. Roots that were used long ago give theirs up.

    Args:
        first: the lowest id that the head's vocabulary lacks.
        new_piece: makes a matrix of PIECE rows.
    """

    def __init__(self, first: int, new_piece: Callable[[], CopiedRows]) -> None:
        self._first = first
        self._make_piece = new_piece
        self._by_owner: OrderedDict[Owner, OwnTokens] = OrderedDict()

    def begin(self, owner: Owner, text: TokenIds) -> None:
        """Note the text [n] of a sequence that begins in a slot."""
        own = self.of(owner) or OwnTokens(self._first, self._new_piece)
        keep_last(self._by_owner, owner, own)
        own.note(text[text >= self._first][-MAX_NOTED:].tolist())

    def of(self, owner: Owner) -> OwnTokens | None:
        """None: the owner has given them up."""
        return self._by_owner.get(owner)

    def release(self, slot: int) -> None:
        self._by_owner.pop(slot, None)

    def read(self, owners: Iterable[Owner]) -> None:
        """Copy rows for drafts of these: of each about as many, and MAX_READ together."""
        each = dict.fromkeys(owners)
        waiting = [one for one in each if (own := self.of(one)) is not None and own.num_unread]
        for owner in waiting:
            self._by_owner.move_to_end(owner)
        left = MAX_READ
        for index, owner in enumerate(waiting):
            if (own := self.of(owner)) is not None:  # else it has given up its own for others
                left -= own.read(-(-left // (len(waiting) - index)))

    def _new_piece(self) -> CopiedRows:
        most = OWN_IDS // PIECE
        while sum(len(own.pieces) for own in self._by_owner.values()) >= most:
            self._by_owner.popitem(last=False)
        return self._make_piece()
