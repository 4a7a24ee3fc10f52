"""Packs ids (of tokens, pages, slots, sequences) as little-endian int32 bytes for messages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

PackedIds = bytes
ID_BYTES = 4
"""Bytes of a packed token id, and of a page id."""


def pack_ids(ids: Sequence[int] | NDArray[np.integer]) -> PackedIds:
    """Pack ids as little-endian int32 bytes, 4 a piece.

    >>> unpack_ids(pack_ids([3, 1])).tolist()
    [3, 1]
    """
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: PackedIds) -> TokenIds:
    """The inverse of :func:`pack_ids`: int32 ``[num_ids]``, read-only, over the same bytes."""
    return np.frombuffer(packed, dtype="<i4")


def num_ids(packed: PackedIds) -> int:
    """Number of packed ids."""
    return len(packed) // ID_BYTES
