"""Which unlocked leaf of the radix tree goes first."""

import heapq

from radixrt.scheduler.node import Node


class LeafLRU:
    """Least recently used first.

    A binary heap with lazy deletion: an entry is stale once its leaf was used again, locked, given a
    child or removed, and is then skipped (or brought up to date) when it comes to the top. O(log n)
    amortised; the heap is rebuilt when stale entries outnumber live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._sequence = 0
        self._rebuild_above = 1024

    def offer(self, leaf: Node) -> None:
        """Tell that ``leaf`` may be evicted from now on."""
        self._sequence += 1  # breaks ties, so that nodes are never compared
        heapq.heappush(self._heap, (leaf.stamp, self._sequence, leaf))
        if len(self._heap) > self._rebuild_above:
            self._rebuild()

    def pop(self) -> Node | None:
        """Take the leaf that was used longest ago; None if every leaf is locked."""
        while self._heap:
            stamp, _, leaf = heapq.heappop(self._heap)
            if leaf.is_evictable and leaf.stamp == stamp:
                return leaf
        return None

    def _rebuild(self) -> None:
        live = {id(e[2]): e for e in self._heap if e[2].is_evictable and e[2].stamp == e[0]}
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._rebuild_above = max(1024, 2 * len(self._heap))
