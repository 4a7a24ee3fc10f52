"""Restricts a sequence to ``allowed_token_ids`` and keeps it from completing a token sequence of
``bad_words``."""

from collections.abc import Iterable, Sequence

import numpy as np

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.messages.ids import TokenIds
from radixrt.worker.sampling.forbidden_paths import ALL_TOKENS, forbid


class TokenRestriction:
    """The restriction of one sequence, followed along its answer. The tokens of the prompt do not
    count."""

    def __init__(
        self,
        sampling: SamplingParams,
        output: TokenIds,
        num_words: int,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            sampling: with ``allowed_token_ids`` or ``bad_words_token_ids``.
            output: the tokens generated before a retraction.
            num_words: of a row of the bitmask.
            end_token_ids: allowed beside ``allowed_token_ids``: of a sequence whose grammar rules
                its end.
        """
        self.failed = False
        """No token is left."""
        self._always = np.full(num_words, ALL_TOKENS, dtype=np.int32)
        """The tokens that are allowed at any point, as a row of the bitmask."""
        if sampling.allowed_token_ids is not None:
            self._always = _row_of({*sampling.allowed_token_ids, *end_token_ids}, num_words)
        self._last: dict[tuple[int, ...], list[int]] = {}
        """The last token of each forbidden sequence, by the tokens before it."""
        for *before, last in sampling.bad_words_token_ids:
            self._last.setdefault(tuple(before), []).append(last)
        forbid(self._always, self._last.pop((), []))
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: list[int] = []
        self.advance(output.tolist())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the tokens that were taken."""
        if self._lengths:
            self._tail = [*self._tail, *token_ids][-self._lengths[-1] :]

    def apply(self, row: BitmaskRow) -> None:
        """Remove the tokens that may not come next from a row of the bitmask."""
        row &= self._always
        for length in self._lengths:
            if length > len(self._tail):
                break
            forbid(row, self._last.get(tuple(self._tail[-length:]), ()))


def _row_of(token_ids: Iterable[int], num_words: int) -> BitmaskRow:
    """A row of the bitmask that allows these tokens alone."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[np.fromiter(token_ids, dtype=np.int64)] = 1
    row: BitmaskRow = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return row
