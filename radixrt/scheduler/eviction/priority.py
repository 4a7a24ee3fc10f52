"""What clients asked to keep goes last."""

from collections.abc import Callable

from radixrt.messages import TokenIds
from radixrt.scheduler.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.node import RETAIN_DEFAULT, Node


class Priority:
    """The lowest retention level goes first; within a level, the leaf that was used longest ago.

    A level holds until its leaf's expiry; from then on the leaf counts as one without a hint.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels: dict[int, LeafHeap] = {RETAIN_DEFAULT: LeafHeap()}
        self._expiring = LeafHeap()

    def offer(self, leaf: Node) -> None:
        level = self._level(leaf)
        self._levels.setdefault(level, LeafHeap()).push(leaf.stamp, leaf)
        if level != RETAIN_DEFAULT and leaf.expires is not None:
            self._expiring.push(leaf.expires, leaf)

    def pop(self) -> Node | None:
        self._demote_expired()
        for level in sorted(self._levels):
            leaf = self._pop_from(level)
            if leaf is not None:
                return leaf
        return None

    def observe(self, tokens: TokenIds, salt: str) -> int:
        return 0  # Hints are on the nodes.

    def _demote_expired(self) -> None:
        now = self._clock()
        while (leaf := self._expiring.peek()) is not None and self._expiring.peek_key() <= now:
            self._expiring.pop()
            self.offer(leaf)

    def _pop_from(self, level: int) -> Node | None:
        """The first leaf that is still of this level; what has changed its level was offered to another."""
        leaves = self._levels[level]
        while (leaf := leaves.pop()) is not None:
            if self._level(leaf) == level:
                return leaf
        return None

    def _level(self, leaf: Node) -> int:
        expired = leaf.expires is not None and leaf.expires <= self._clock()
        return RETAIN_DEFAULT if expired else leaf.retention
