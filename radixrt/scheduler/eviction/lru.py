"""Least recently used first."""

from radixrt.messages import TokenIds
from radixrt.scheduler.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.eviction.policy import Use
from radixrt.scheduler.node import Node


class LeafLRU:
    """The leaf that was used longest ago goes first.

    A prefix is used whenever what continues it is, so interior nodes need no time stamps of their own.
    """

    def __init__(self) -> None:
        self._leaves = LeafHeap()

    def offer(self, leaf: Node) -> None:
        self._leaves.push(leaf.stamp, leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()

    def observe(self, tokens: TokenIds, salt: str) -> None:
        return None  # Recency is on the nodes.

    def observe_end(self, use: Use, num_output: int) -> None:
        pass
