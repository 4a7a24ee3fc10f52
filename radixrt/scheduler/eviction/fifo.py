"""First in, first out."""

from radixrt.messages import TokenIds
from radixrt.scheduler.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.eviction.policy import Use
from radixrt.scheduler.node import Node


class FIFO:
    """The leaf that was computed longest ago goes first, however often it was used. For comparison."""

    def __init__(self) -> None:
        self._leaves = LeafHeap()

    def offer(self, leaf: Node) -> None:
        self._leaves.push(leaf.created, leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()

    def observe(self, tokens: TokenIds, salt: str) -> None:
        return None  # The order of arrival is on the nodes.

    def observe_end(self, use: Use, num_output: int) -> None:
        pass
