"""A binary heap of leaves with lazy deletion.

An entry is stale once its leaf was used again, locked, given a child or removed, and is skipped
when it comes to the top. O(log n) amortised: the heap is rebuilt when stale entries outnumber live
ones.
"""

import heapq

from radixrt.scheduler.radix.node import Node

SMALLEST_REBUILD = 1024


class LeafHeap:
    """Evictable leaves, smallest key first, each with the key it was last pushed with."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        """Key, stamp at the time of the push, and leaf; of equal keys the least recently used comes
        first."""
        self._rebuild_above = SMALLEST_REBUILD

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._heap)

    def push(self, key: float, leaf: Node) -> None:
        heapq.heappush(self._heap, (key, leaf.stamp, leaf))
        if len(self._heap) > self._rebuild_above:
            self._rebuild()

    def peek(self) -> Node | None:
        """The leaf with the smallest key, which stays in the heap; None if there is none."""
        while self._heap:
            _, stamp, leaf = self._heap[0]
            if self._is_live(leaf, stamp):
                return leaf
            heapq.heappop(self._heap)
        return None

    def peek_key(self) -> float:
        """The key of the leaf that :meth:`peek` has just returned."""
        return self._heap[0][0]

    def pop(self) -> Node | None:
        leaf = self.peek()
        if leaf is not None:
            heapq.heappop(self._heap)
        return leaf

    @staticmethod
    def _is_live(leaf: Node, stamp: int) -> bool:
        return leaf.is_evictable and leaf.stamp == stamp

    def _rebuild(self) -> None:
        live = {id(e[2]): e for e in self._heap if self._is_live(e[2], e[1])}
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._rebuild_above = max(SMALLEST_REBUILD, 2 * len(self._heap))
