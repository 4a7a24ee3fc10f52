"""The ids that the radix tree matches: tokens, or numbers that stand for tokens behind which an
activated adapter works.

Up to its invocation an activated adapter (Greenewald et al., "Activated LoRA", 2025) uses the base
model's KV. So its sequences are in the tree of the base model, and from the invocation on each
token has an id in the adapter's own *namespace*: tree, eviction and leases need not know of it.
"""

import numpy as np

from radixrt.messages.ids import TokenIds, num_ids, unpack_ids

_TOKEN_BITS = 20
MAX_NAMESPACES = (1 << 31 - _TOKEN_BITS) - 1

_FACTOR = 0x9E3779B1


def key_ids(ids: TokenIds, namespace: int) -> TokenIds:
    """The ids of tokens in a namespace: [n] int32, beyond every vocabulary. Those of images, which
    are negative and random, become others that are.

    >>> tokens = np.array([5, 6], np.int32)
    >>> key_ids(tokens, 0).tolist(), tokens_of(key_ids(tokens, 7)).tolist()
    ([1048581, 1048582], [5, 6])
    """
    number = namespace + 1
    other_image = np.int32(number * _FACTOR & 0x7FFFFFFF)
    return np.where(ids < 0, ids ^ other_image, ids | np.int32(number << _TOKEN_BITS))


def tokens_of(ids: TokenIds) -> TokenIds:
    """The tokens for which ids stand, and the ids of images: [n] int32."""
    return np.where(ids < 0, ids, ids & np.int32((1 << _TOKEN_BITS) - 1))


def num_before_invocation(packed: bytes) -> int:
    """The leading ones of packed ids that are before an invocation. Those behind it mean nothing to
    another process.

    >>> num_before_invocation(np.array([5, -7, 1 << 20, -8], np.int32).tobytes())
    2
    """
    is_behind = unpack_ids(packed) >= 1 << _TOKEN_BITS
    return int(is_behind.argmax()) if is_behind.any() else len(is_behind)


def is_activated(packed: bytes) -> bool:
    """Whether some of packed ids are tokens behind an invocation. Images behind one do not show it."""
    return num_before_invocation(packed) < num_ids(packed)


def last_occurrence(tokens: TokenIds, wanted: tuple[int, ...]) -> int:
    """Where a sequence of tokens begins for the last time; -1: it is not there."""
    if len(tokens) < len(wanted):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    found = np.flatnonzero((windows == np.array(wanted, np.int32)).all(axis=1))
    return int(found[-1]) if len(found) else -1
