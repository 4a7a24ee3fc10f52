"""A priority queue whose items may change their key or leave at any time."""

import heapq
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", int, str)
Entry = tuple[Any, ...]
"""A key, and the item itself at the end."""

_STALE_TO_LIVE = 4
"""Rebuilding takes milliseconds for ten thousand items, so it must be rare enough to stay out of
the 99th percentile."""


class LazyHeap(Generic[Item]):
    """The item with the smallest key is first, and of equal keys the smallest item; O(log n)
    amortised.

    A stale entry, whose item has another key now or has left, stays in the heap until it comes to
    the top, or until the heap is rebuilt because stale entries outnumber the others by far.

    >>> heap: LazyHeap[int] = LazyHeap()
    >>> heap.place(7, 0.5)
    >>> heap.place(8, 0.2)
    >>> heap.discard(8)
    >>> heap.first()
    7
    """

    def __init__(self) -> None:
        self._live: dict[Item, Entry] = {}
        """The valid entry of each item."""
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._live)

    def place(self, item: Item, *key: float) -> None:
        """Add an item, or change its key."""
        entry = self._live[item] = (*key, item)
        heapq.heappush(self._entries, entry)
        self._drop_stale()

    def discard(self, item: Item) -> None:
        """Remove an item; does nothing if it is not here."""
        if self._live.pop(item, None) is not None:
            self._drop_stale()

    def _drop_stale(self) -> None:
        if len(self._entries) > 1024 + _STALE_TO_LIVE * len(self._live):
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)

    def first(self) -> Item:
        """The item with the smallest key; the heap must not be empty."""
        while True:
            entry = self._entries[0]
            item: Item = entry[-1]
            if self._live.get(item) is entry:
                return item
            heapq.heappop(self._entries)
