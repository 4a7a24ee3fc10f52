"""A priority queue whose items may change their place or leave at any time."""

import heapq

Key = tuple[int, ...]

_STALE_TO_LIVE = 4
"""Rebuilding takes milliseconds when ten thousand wait: it has to be rare enough to stay out of the 99th percentile."""


class LazyHeap:
    """The item with the smallest key is first; O(log n) amortised for everything.

    An entry whose item has got another key or has left stays in the heap until it comes to the top, or until
    such entries outnumber the others by far.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._entries: list[tuple[Key, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def place(self, item: int, key: Key) -> None:
        """Put an item in, or move it."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._entries, (key, item))
        if len(self._entries) > 1024 + _STALE_TO_LIVE * len(self._keys):
            self._entries = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._entries)

    def discard(self, item: int) -> None:
        """Take an item out; does nothing if it is not here."""
        self._keys.pop(item, None)

    def first(self) -> int:
        """The item with the smallest key; the heap must not be empty."""
        while True:
            key, item = self._entries[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._entries)
