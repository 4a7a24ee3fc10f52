"""How the worker holds a sequence to its grammar: one interface, whichever library does the work."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BitmaskRow = NDArray[np.int32]
"""[ceil(vocab_size / 32)]; bit ``t % 32`` of word ``t // 32`` tells whether token t may come next."""


def bitmask_words(vocab_size: int) -> int:
    """Length of a row of the bitmask."""
    return -(-vocab_size // 32)


class Matcher(Protocol):
    """Where a sequence stands in its grammar. Not thread-safe; different matchers may be used in parallel.

    End tokens are those of the tokenizer facts: they are allowed exactly where the grammar may end, and
    taking one ends it.
    """

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take tokens; returns how many were taken: all, or those before the first that is not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Give back the last tokens taken."""

    def fill_mask(self, row: BitmaskRow) -> None:
        """Write the tokens that may come next over ``row``, a C-contiguous row of the bitmask."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as many as are certain; without end tokens, often none.

        They are those that decoding step by step with :meth:`fill_mask` would be left with.
        """

    def is_terminated(self) -> bool:
        """Nothing but an end token may come."""

    def fork(self) -> "Matcher":
        """An independent matcher in the same state."""


def single_token(row: BitmaskRow) -> int | None:
    """The token that a row allows, if it is only one."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word.bit_count() == 1 else None
