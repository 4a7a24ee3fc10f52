"""What clients have said goes before what a policy guesses.

Leaves of a lower retention level go first. Within a level, the leaf goes that is needed latest, as far as that is known:
where a client has said when it will go on, the time until then; else the time since the last use, for
what has not been used for a while is likely to stay unused for about as long again. A leaf whose stated use is overdue
counts as used when it was due. So the cache evicts like Belady's optimum where clients tell their future, and
like the policy below where they don't: without hints there is no difference at all.
"""

from collections.abc import Callable

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.eviction.by_key import least_recently_used
from radixrt.scheduler.radix.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy, Use
from radixrt.scheduler.radix.hint import DEFAULT, HIGH, NONE, Hint
from radixrt.scheduler.radix.node import Node


class Hinted(EvictionPolicy):
    """Asks ``base`` for leaves of the level "default" whose next use nobody has stated.

    O(log n) besides what the base takes. A leaf that comes to another heap leaves an entry behind in the one it
    was in; those are skipped when they come to the top.
    """

    def __init__(self, base: EvictionPolicy, clock: Callable[[], float]) -> None:
        self._base = base
        self._clock = clock
        self._levels = [
            _Level(NONE, least_recently_used()),
            _Level(DEFAULT, base),
            _Level(HIGH, least_recently_used()),
        ]
        self._changing = LeafHeap()
        """By the time at which what is said of a leaf changes."""

    def offer(self, leaf: Node) -> None:
        if leaf.hint is not None:
            self._forget_what_is_past(leaf)
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

    def observe(self, tokens: TokenIds, salt: str) -> Use | None:
        return self._base.observe(tokens, salt)

    def observe_end(self, use: Use, num_output: int) -> None:
        self._base.observe_end(use, num_output)

    def _forget_what_is_past(self, leaf: Node) -> None:
        """A use that was due counts as one, so the base is offered a leaf with a new stamp."""
        assert leaf.hint is not None
        now, due = self._clock(), leaf.hint.next_use
        if due is not None and due <= now:
            leaf.stamp = max(leaf.stamp, int(due * 1e9))
        leaf.hint = leaf.hint.at(now)


class _Level:
    """The leaves of one retention level: those whose next use is stated, and the others."""

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
        return (leaf.hint or _NO_HINT).level == self._level


def _next_use(leaf: Node) -> float | None:
    return None if leaf.hint is None else leaf.hint.next_use


_NO_HINT = Hint()
