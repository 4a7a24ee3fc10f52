"""What will be used for certain, because somebody waits for it? The cached prefixes of waiting requests go last.

A policy guesses who comes back; who stands in the queue is back. Where a server is overloaded that is most of what
can be known: on recorded agent sessions it closes up to a third of the gap between LRU and Belady's optimum. Among
leaves that are all awaited, the one whose first request arrived last goes first, as it will be needed last.
"""

import heapq
from itertools import count

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy, Use
from radixrt.scheduler.radix.hint import HIGH
from radixrt.scheduler.radix.node import Node

MOST_NOTED = 64
"""Sequences noted for one leaf. Where more wait for it, the others are noted when they come to be next in line."""


class Awaited(EvictionPolicy):
    """Asks ``base``, and puts the leaves aside that somebody waits for.

    A leaf that a client wants kept at the level "high" goes after the awaited ones of others. O(log n) amortised besides what the
    base takes: a leaf is put aside once for each time that it is offered.
    """

    def __init__(self, base: EvictionPolicy) -> None:
        self._base = base
        self._prefix_of: dict[int, Node] = {}
        """By sequence: the node in whose edge its cached prefix ends."""
        self._waiting_for: dict[Node, dict[int, float]] = {}
        """By node: sequences and when they arrived."""
        self._aside: set[Node] = set()
        self._latest: list[tuple[tuple[bool, float], int, Node]] = []
        """A heap of those aside, which is needed last at the top; with outdated entries."""
        self._tickets = count()
        self.evicted: dict[int, None] = {}
        """Sequences whose prefix has become shorter, for the queue to take and look up anew: or it would not notice when
        the prefix grows again."""
        self._given: tuple[Node, Node] | None = None
        """The awaited leaf that was given away last, and its parent."""

    # ------------------------------------------------------------ who waits

    def expect(self, seq_id: int, arrived: float, node: Node) -> None:
        """A sequence waits whose cached prefix ends in the edge above ``node``."""
        if self._prefix_of.get(seq_id) is not node:
            self.forget(seq_id)
            if node.parent is not None and len(self._waiting_for.get(node, ())) < MOST_NOTED:
                self._prefix_of[seq_id] = node
                self._waiting_for.setdefault(node, {})[seq_id] = arrived

    def forget(self, seq_id: int) -> None:
        """A sequence waits no longer; does nothing if it was not expected."""
        self.evicted.pop(seq_id, None)
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

    def _follow(self) -> None:
        """Whoever waited for a leaf that is gone waits for what it hung from."""
        if self._given is None:
            return
        (leaf, parent), self._given = self._given, None
        if leaf.parent is None:
            for seq_id, arrived in [*self._waiting_for.get(leaf, {}).items()]:
                self.expect(seq_id, arrived, parent)
                self.evicted[seq_id] = None

    # ------------------------------------------------------------ the policy

    def offer(self, leaf: Node) -> None:
        self._follow()
        self._aside.discard(leaf)
        self._base.offer(leaf)

    def pop(self) -> Node | None:
        self._follow()
        while (leaf := self._base.pop()) is not None:
            if leaf in self._aside:
                continue  # a policy may hold several entries of a leaf
            if leaf not in self._waiting_for:
                if not _is_high(leaf):
                    return leaf
                return self._rather_awaited(leaf)
            self._put_aside(leaf)
        awaited = self._pop_aside()
        return None if awaited is None else self._give(awaited)

    def _rather_awaited(self, high: Node) -> Node:
        """An awaited leaf in place of one that is to be kept."""
        awaited = self._pop_aside()
        if awaited is None:
            return high
        if _is_high(awaited):
            self._put_aside(awaited)
            return high
        self._base.offer(high)
        return self._give(awaited)

    def observe(self, tokens: TokenIds, salt: str) -> Use | None:
        return self._base.observe(tokens, salt)

    def observe_end(self, use: Use, num_output: int) -> None:
        self._base.observe_end(use, num_output)

    # ------------------------------------------------------------ those aside

    def _put_aside(self, leaf: Node) -> None:
        self._aside.add(leaf)
        heapq.heappush(self._latest, (self._order(leaf), next(self._tickets), leaf))

    def _order(self, leaf: Node) -> tuple[bool, float]:
        return _is_high(leaf), -min(self._waiting_for[leaf].values())

    def _pop_aside(self) -> Node | None:
        """Of those aside, the leaf that is needed last."""
        while self._latest:
            order, _, leaf = heapq.heappop(self._latest)
            if leaf not in self._aside:
                continue
            self._aside.discard(leaf)
            if not leaf.is_evictable:
                continue  # it will be offered again
            if self._order(leaf) == order:
                return leaf
            self._put_aside(leaf)  # by who waits now
        return None

    def _give(self, leaf: Node) -> Node:
        assert leaf.parent is not None
        self._given = (leaf, leaf.parent)
        return leaf


def _is_high(leaf: Node) -> bool:
    return leaf.hint is not None and leaf.hint.level == HIGH
