"""The ids that the radix tree matches: tokens, or negative numbers that stand for tokens behind
which an activated adapter works. Those below LOWEST stand for images
(:func:`radixrt.messages.images.image_key_ids`).

Up to its invocation an activated adapter (Greenewald et al., "Activated LoRA", 2025) uses the base
model's KV. So its sequences are in the tree of the base model, and from the invocation on each
token has an id in the adapter's own *namespace*: tree, eviction and leases need not know of it.
"""

import numpy as np

from radixrt.messages.ids import TokenIds

_TOKEN_BITS = 20
_ID_BITS = 30
MAX_NAMESPACES = 1 << _ID_BITS - _TOKEN_BITS
LOWEST = -(1 << _ID_BITS)


def key_ids(tokens: TokenIds, namespace: int) -> TokenIds:
    """The ids of tokens in a namespace: [n] int32, all negative.

    >>> tokens = np.array([5, 6], np.int32)
    >>> key_ids(tokens, 0).tolist(), tokens_of(key_ids(tokens, 7)).tolist()
    ([-6, -7], [5, 6])
    """
    return np.invert(tokens | np.int32(namespace << _TOKEN_BITS))


def tokens_of(ids: TokenIds) -> TokenIds:
    """The tokens for which ids stand: [n] int32; those of images stay."""
    is_other = (ids < 0) & (ids >= LOWEST)
    return np.where(is_other, np.invert(ids) & np.int32((1 << _TOKEN_BITS) - 1), ids)


def last_occurrence(tokens: TokenIds, wanted: tuple[int, ...]) -> int:
    """Where a sequence of tokens begins for the last time; -1: it is not there."""
    if len(tokens) < len(wanted):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    found = np.flatnonzero((windows == np.array(wanted, np.int32)).all(axis=1))
    return int(found[-1]) if len(found) else -1
