"""Evicts the cached prefixes of waiting requests last.

An eviction policy predicts the prefixes that will be used again. The prefixes of queued requests
are certain to be used. On recorded agent sessions this policy closes up to a third of the gap
between LRU and Belady's optimum on an overloaded server (docs/internals/caching.md). Among awaited
leaves, the leaf whose first request arrived last is evicted first, because it is needed last.
"""

import heapq
from collections.abc import Iterable
from itertools import count, islice

from radixrt.scheduler.radix.eviction.policy import EvictionPolicy
from radixrt.scheduler.radix.hint import HIGH
from radixrt.scheduler.radix.node import Node

MAX_NOTED = 64
"""Sequences noted for one leaf. Further ones are noted when they come near the head of the
queue."""


class Awaited(EvictionPolicy):
    """Wraps ``base`` and sets aside the leaves that waiting sequences will use.

    A leaf of the retention level "high" is evicted after the awaited leaves of other levels. O(log
    n) amortised besides the costs of ``base``: a leaf is set aside once for each time that it is
    offered.
    """

    follows_queue = True

    def __init__(self, base: EvictionPolicy) -> None:
        self.orders_by_priority = base.orders_by_priority
        self._base = base
        self._prefix_of: dict[int, Node] = {}
        """The node in whose edge the cached prefix of a sequence ends, by sequence."""
        self._waiting_for: dict[Node, dict[int, float]] = {}
        """The sequences that wait for a node, with their times of arrival, by node."""
        self._aside: set[Node] = set()
        self._latest: list[tuple[tuple[bool, float], int, Node]] = []
        """Heap of the leaves set aside, the one needed last at the top; with stale entries."""
        self._tickets = count()
        self._shortened: dict[int, None] = {}
        """Sequences for :meth:`take_shortened`. The queue has to look them up again, or it would
        not notice when the prefix grows again."""
        self._given: tuple[Node, Node] | None = None
        """The awaited leaf that :meth:`pop` has returned last, and its parent."""

    # ------------------------------------------------------------ events of the waiting queue

    def expect(self, seq_id: int, arrived: float, node: Node) -> None:
        if self._prefix_of.get(seq_id) is not node:
            self.forget(seq_id)
            if node.parent is not None and len(self._waiting_for.get(node, ())) < MAX_NOTED:
                self._prefix_of[seq_id] = node
                self._waiting_for.setdefault(node, {})[seq_id] = arrived

    def forget(self, seq_id: int) -> None:
        self._shortened.pop(seq_id, None)
        node = self._prefix_of.pop(seq_id, None)
        if node is None:
            return
        waiting = self._waiting_for[node]
        del waiting[seq_id]
        if waiting:
            return
        del self._waiting_for[node]
        if node in self._aside:
            self._aside.discard(node)
            if node.is_evictable:
                self._base.offer(node)

    def awaited(self) -> Iterable[tuple[Node, int]]:
        return ((node, len(waiting)) for node, waiting in self._waiting_for.items())

    def take_shortened(self, limit: int) -> list[int]:
        taken = [*islice(self._shortened, limit)]
        for seq_id in taken:
            del self._shortened[seq_id]
        return taken

    def _follow(self) -> None:
        """Sequences that waited for a leaf that has left the tree wait for its parent."""
        if self._given is None:
            return
        (leaf, parent), self._given = self._given, None
        if leaf.parent is None:
            for seq_id, arrived in [*self._waiting_for.get(leaf, {}).items()]:
                self.expect(seq_id, arrived, parent)
                self._shortened[seq_id] = None

    # ------------------------------------------------------------ order

    def offer(self, leaf: Node) -> None:
        self._follow()
        self._aside.discard(leaf)
        self._base.offer(leaf)

    def taken(self, leaf: Node) -> None:
        self._follow()
        self._aside.discard(leaf)
        self._give(leaf)

    def pop(self) -> Node | None:
        self._follow()
        while (leaf := self._base.pop()) is not None:
            if leaf in self._aside:
                continue  # a policy may hold several entries of a leaf
            if leaf in self._waiting_for:
                self._set_aside(leaf)
            elif _is_high(leaf):
                return self._awaited_before(leaf)
            else:
                return leaf
        awaited = self._pop_aside()
        return None if awaited is None else self._give(awaited)

    def _awaited_before(self, high: Node) -> Node:
        """An awaited leaf of a lower level than ``high``, if there is one; otherwise ``high``."""
        awaited = self._pop_aside()
        if awaited is None:
            return high
        if _is_high(awaited):
            self._set_aside(awaited)
            return high
        self._base.offer(high)
        return self._give(awaited)

    def _set_aside(self, leaf: Node) -> None:
        self._aside.add(leaf)
        heapq.heappush(self._latest, (self._order(leaf), next(self._tickets), leaf))

    def _order(self, leaf: Node) -> tuple[bool, float]:
        return _is_high(leaf), -min(self._waiting_for[leaf].values())

    def _pop_aside(self) -> Node | None:
        """The leaf that is needed last of those set aside."""
        while self._latest:
            order, _, leaf = heapq.heappop(self._latest)
            if leaf not in self._aside:
                continue
            self._aside.discard(leaf)
            if not leaf.is_evictable:
                continue  # it will be offered again
            if self._order(leaf) == order:
                return leaf
            self._set_aside(leaf)  # other sequences wait for it now
        return None

    def _give(self, leaf: Node) -> Node:
        assert leaf.parent is not None
        self._given = (leaf, leaf.parent)
        return leaf


def _is_high(leaf: Node) -> bool:
    return leaf.hint is not None and leaf.hint.level == HIGH
