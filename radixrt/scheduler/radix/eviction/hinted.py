"""Evicts by the clients' hints before the order of another policy.

Leaves of a lower retention level are evicted first. Within a level, the leaf that is needed latest
is evicted first: a leaf with a stated next use is needed then; a leaf without one is taken to be
needed after as long a time as it has been unused. A leaf whose next use is overdue counts as used
when it was due. So the cache evicts like Belady's optimum where clients state their next uses, and
exactly like the base policy where there are no hints.
"""

from collections.abc import Callable

from radixrt.scheduler.radix.eviction.by_key import least_recently_used
from radixrt.scheduler.radix.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy
from radixrt.scheduler.radix.hint import DEFAULT, HIGH, NONE
from radixrt.scheduler.radix.node import Node


class Hinted(EvictionPolicy):
    """Orders leaves of the level "default" without a stated next use by ``base``.

    O(log n) besides the costs of ``base``. A leaf that moves to another heap leaves an entry
    behind, which is skipped when it comes to the top.
    """

    def __init__(self, base: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.orders_by_priority = base.orders_by_priority
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
