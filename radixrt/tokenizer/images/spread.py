"""Repeats the placeholders of images in token ids."""

from collections.abc import Sequence

import numpy as np

from radixrt.messages.ids import TokenIds


class Spread:
    """Takes the ids of a text, or of a part of it, to those with each placeholder repeated.

    >>> spread = Spread(7, [3, 2])
    >>> spread(np.array([1, 7, 2, 7], dtype=np.int32)).tolist(), spread(np.array([7]), 1).tolist()
    ([1, 7, 7, 7, 2, 7, 7], [7, 7])

    Args:
        placeholder: its token id.
        counts: how often each placeholder of the text stands in the prompt.
    """

    def __init__(self, placeholder: int, counts: Sequence[int]) -> None:
        self._placeholder = placeholder
        self._counts = np.array(counts, dtype=np.int64)

    def num_in(self, ids: TokenIds) -> int:
        """Placeholders among ids that are not spread."""
        return int(np.count_nonzero(ids == self._placeholder)) if len(self._counts) else 0

    def __call__(self, ids: TokenIds, first: int = 0) -> TokenIds:
        """[n] -> [at least n] int32. Placeholders that are of no image stay alone.

        Args:
            first: placeholders before these ids.
        """
        if not len(self._counts):
            return ids
        repeats = np.ones(len(ids), dtype=np.int64)
        places = np.flatnonzero(ids == self._placeholder)
        counts = self._counts[first : first + len(places)]
        repeats[places[: len(counts)]] = counts
        return np.repeat(ids, repeats)


AS_THEY_ARE = Spread(-1, ())
"""For a text without images."""
