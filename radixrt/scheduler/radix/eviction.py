"""Eviction policies order the unlocked leaves of the radix tree: the values of ``--eviction-
policy``.

The tree trims the leaf that :meth:`EvictionPolicy.pop` returns from its tail, page by page, and
offers the rest again. Clients' hints come before the order of a policy by key (:class:`Hinted`),
and the prefixes of waiting requests are evicted last (:class:`Awaited`).
"""

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Protocol

from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.scheduler.radix.node import DEFAULT, HIGH, NONE, Node
from radixrt.scheduler.radix.return_hazards import EVEN_ODDS, NUM_CLASSES, ReturnHazards


class EvictionPolicy(Protocol):
    """Orders the leaves that may be evicted."""

    orders_by_priority: bool = False
    """Whether requests note their ``priority`` on the nodes that they used."""
    follows_queue: bool = False
    """Whether the waiting queue tells :meth:`expect` and :meth:`forget`."""
    hazards: ReturnHazards | None = None
    """Hears of requests that begin and end; None: the policy does not learn from them."""

    @abstractmethod
    def offer(self, leaf: Node) -> None:
        """``leaf`` may be evicted from now on. It is offered again when its place in the order may
        have changed."""

    @abstractmethod
    def pop(self) -> Node | None:
        """Take the leaf to evict first; None if every leaf is locked."""

    def taken(self, leaf: Node) -> None:
        """``leaf`` is evicted now for another reason than its place in the order."""
        return

    # ------------------------------------------------------------ events of the waiting queue

    def expect(self, seq_id: int, arrived: float, node: Node) -> None:
        """A sequence waits whose cached prefix ends at the end of ``node``."""
        return

    def forget(self, seq_id: int) -> None:
        """A sequence waits no longer. Unknown ids are ignored."""
        return

    def awaited(self) -> Iterable[tuple[Node, int]]:
        """Nodes in whose edges the cached prefixes of waiting sequences end, with the number of
        these sequences."""
        return ()

    def take_shortened(self, limit: int) -> list[int]:
        """Return up to ``limit`` waiting sequences whose cached prefix was shortened by eviction.
        Each is returned once."""
        return []


SMALLEST_REBUILD = 1024


class LeafHeap:
    """Evictable leaves, smallest key first, each with the key it was last pushed with."""

    def __init__(self, most: int | None = None) -> None:
        """
        Args:
            most: entries that are kept when stale ones are removed, for a heap whose leaves mostly
                leave by another one; None: all.
        """
        self._most = most
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
        if self._most is None:
            heapq.heapify(self._heap)
        else:
            self._heap = heapq.nsmallest(self._most, self._heap)
        self._rebuild_above = max(SMALLEST_REBUILD, 2 * len(self._heap))


class ByKey(EvictionPolicy):
    """Evicts the leaf with the smallest key first; of equal keys, the least recently used."""

    def __init__(self, key: Callable[[Node], float], *, orders_by_priority: bool = False) -> None:
        self.orders_by_priority = orders_by_priority
        self._key = key
        self._leaves = LeafHeap()

    def offer(self, leaf: Node) -> None:
        self._leaves.push(self._key(leaf), leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()


def least_recently_used() -> ByKey:
    """Evicts the least recently used leaf first.

    A prefix is used whenever its continuation is, so interior nodes need no time stamps of their
    own.
    """
    return ByKey(lambda leaf: leaf.stamp)


def first_in_first_out() -> ByKey:
    """Evicts the leaf that was computed longest ago first. For comparison."""
    return ByKey(lambda leaf: leaf.created)


def least_urgent() -> ByKey:
    """Evicts the leaf first whose last request had the largest ``priority``; the smallest number is
    the most urgent."""
    return ByKey(
        lambda leaf: 0 if leaf.hint is None else -leaf.hint.priority, orders_by_priority=True
    )


CLEARLY_LESS = 0.5
"""A leaf is evicted before the least recently used one if its rate of returns is at most this share
of the other's. Odds are learned from few returns: small differences between them are chance."""


class ByValue(EvictionPolicy):
    """Evicts the least recently used leaf, or one that is clearly less likely to return.

    O(log n): of each class of odds, the oldest and the newest leaf are looked at, as the chance of a
    return may rise with age, or fall.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.hazards: ReturnHazards = ReturnHazards()
        self._clock = clock
        self._oldest = [LeafHeap() for _ in range(NUM_CLASSES)]
        self._newest = [LeafHeap(SMALLEST_REBUILD // 2) for _ in range(NUM_CLASSES)]

    def offer(self, leaf: Node) -> None:
        kind = EVEN_ODDS if leaf.visit is None else leaf.visit.kind
        self._oldest[kind].push(leaf.stamp, leaf)
        self._newest[kind].push(-leaf.stamp, leaf)

    def pop(self) -> Node | None:
        now = self._clock()
        tops = [
            (self.hazards.rate(kind, now - leaf.stamp * 1e-9), leaf.stamp, heap)
            for heaps in (self._oldest, self._newest)
            for kind, heap in enumerate(heaps)
            if (leaf := heap.peek()) is not None
        ]
        if not tops:
            return None
        least, oldest = min(tops, key=lambda top: top[:2]), min(tops, key=lambda top: top[1])
        return (least if least[0] <= CLEARLY_LESS * oldest[0] else oldest)[2].pop()


class Hinted(EvictionPolicy):
    """Orders leaves of the level "default" without a stated next use by ``base``.

    O(log n) besides the costs of ``base``. A leaf that moves to another heap leaves an entry
    behind, which is skipped when it comes to the top.
    """

    def __init__(self, base: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.orders_by_priority, self.hazards = base.orders_by_priority, base.hazards
        self._base = base
        self._clock = clock
        self._levels = [
            _LeavesOfLevel(NONE, least_recently_used()),
            _LeavesOfLevel(DEFAULT, base),
            _LeavesOfLevel(HIGH, least_recently_used()),
        ]
        self._changing = LeafHeap()
        """Leaves by the time at which their hints change."""

    def offer(self, leaf: Node) -> None:
        if leaf.hint is not None:
            self._drop_outdated_hint(leaf)
        if leaf.hint is None:
            self._base.offer(leaf)
            return
        self._levels[leaf.hint.level].offer(leaf)
        change = leaf.hint.next_change()
        if change is not None:
            self._changing.push(change, leaf)

    def pop(self) -> Node | None:
        now = self._clock()
        while (leaf := self._changing.peek()) is not None and self._changing.peek_key() <= now:
            self._changing.pop()
            self.offer(leaf)
        leaves = (level.pop(now) for level in self._levels)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def _drop_outdated_hint(self, leaf: Node) -> None:
        """Keep the part of a hint that still holds; a next use that was due counts as a use."""
        assert leaf.hint is not None
        now, due = self._clock(), leaf.hint.next_use
        if due is not None and due <= now:
            leaf.stamp = max(leaf.stamp, int(due * 1e9))
        leaf.hint = leaf.hint.valid_at(now)


class _LeavesOfLevel:
    """The leaves of one retention level, with and without a stated next use."""

    def __init__(self, level: int, unstated: EvictionPolicy) -> None:
        self._level = level
        self._unstated = unstated
        self._stated = LeafHeap()
        """Latest next use first."""

    def offer(self, leaf: Node) -> None:
        next_use = _next_use(leaf)
        if next_use is None:
            self._unstated.offer(leaf)
        else:
            self._stated.push(-next_use, leaf)

    def pop(self, now: float) -> Node | None:
        stated, unstated = self._first_stated(), self._pop_unstated()
        if stated is None:
            return unstated
        if unstated is not None:
            next_use = _next_use(stated)
            assert next_use is not None
            if now - unstated.stamp * 1e-9 >= next_use - now:
                return unstated
            self._unstated.offer(unstated)
        return self._stated.pop()

    def _first_stated(self) -> Node | None:
        while (leaf := self._stated.peek()) is not None:
            if self._is_here(leaf) and _next_use(leaf) == -self._stated.peek_key():
                return leaf
            self._stated.pop()
        return None

    def _pop_unstated(self) -> Node | None:
        while (leaf := self._unstated.pop()) is not None:
            if self._is_here(leaf) and _next_use(leaf) is None:
                return leaf
        return None

    def _is_here(self, leaf: Node) -> bool:
        return (DEFAULT if leaf.hint is None else leaf.hint.level) == self._level


def _next_use(leaf: Node) -> float | None:
    return None if leaf.hint is None else leaf.hint.next_use


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
        self.orders_by_priority, self.hazards = base.orders_by_priority, base.hazards
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


Clock = Callable[[], float]

POLICIES: dict[EvictionPolicyName, Callable[[Clock], EvictionPolicy]] = {
    "value": lambda clock: Awaited(Hinted(ByValue(clock), clock)),
    "lru": lambda clock: Awaited(Hinted(least_recently_used(), clock)),
    "fifo": lambda clock: Hinted(first_in_first_out(), clock),
    "priority": lambda clock: Hinted(least_urgent(), clock),
}


def eviction_rule(policy: EvictionPolicyName, leaf: Node, is_above_share: bool) -> str:
    """The rule by which a leaf was chosen, as explanations of cache misses name it."""
    if is_above_share:
        return "max_cached_fraction"
    if leaf.hint is None or leaf.hint.level not in (NONE, HIGH):
        stated = leaf.hint is not None and leaf.hint.next_use is not None
        return "next_use" if stated else policy
    return "retain=none" if leaf.hint.level == NONE else "retain=high"


def make_policy(name: EvictionPolicyName, clock: Clock) -> EvictionPolicy:
    """A new policy; ``clock`` gives seconds."""
    return POLICIES[name](clock)
