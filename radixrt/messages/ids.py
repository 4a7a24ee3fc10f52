"""Which ids travel packed, and how?"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

PackedIds = bytes


def pack_ids(ids: Sequence[int] | NDArray[np.integer]) -> PackedIds:
    """Pack token, page, slot or sequence ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: PackedIds) -> TokenIds:
    """The inverse of :func:`pack_ids`; the array is read-only and shares the bytes."""
    return np.frombuffer(packed, dtype="<i4")


def num_ids(packed: PackedIds) -> int:
    """How many ids are packed."""
    return len(packed) // 4
