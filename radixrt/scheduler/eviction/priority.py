"""What urgent requests used goes last."""

from radixrt.messages import TokenIds
from radixrt.scheduler.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.node import Node


class Priority:
    """The leaf goes first whose last request had the largest ``priority``; of equal ones, that used longest ago.

    As in the waiting queue of that name, the smallest number is the most urgent.
    """

    def __init__(self) -> None:
        self._leaves = LeafHeap()

    def offer(self, leaf: Node) -> None:
        priority = 0 if leaf.hint is None else leaf.hint.priority
        self._leaves.push((-priority, leaf.stamp), leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()

    def observe(self, tokens: TokenIds, salt: str) -> int:
        return 0  # The requests' priorities are on the nodes.
