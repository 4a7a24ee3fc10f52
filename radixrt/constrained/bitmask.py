"""Layout of the token bitmask: one bit per token, in rows of int32 words."""

import numpy as np
from numpy.typing import NDArray

BitmaskRow = NDArray[np.int32]
"""[ceil(vocab_size / 32)]; bit ``t % 32`` of word ``t // 32`` is set if token t may come next."""


def bitmask_words(vocab_size: int) -> int:
    """Length of a row of the bitmask."""
    return -(-vocab_size // 32)


def single_token(row: BitmaskRow) -> int | None:
    """The token that a row allows, if it is only one."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word.bit_count() == 1 else None


def allows(row: BitmaskRow, token_id: int) -> bool:
    """Whether a row allows a token."""
    return bool(int(row[token_id // 32]) >> token_id % 32 & 1)
