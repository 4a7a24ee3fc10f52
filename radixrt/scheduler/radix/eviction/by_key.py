"""Which leaf has the smallest key? The policies that need to know no more than what is on a node."""

from collections.abc import Callable

from radixrt.scheduler.radix.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy
from radixrt.scheduler.radix.node import Node


class ByKey(EvictionPolicy):
    """The leaf with the smallest key goes first; of equal ones, that used longest ago."""

    def __init__(self, key: Callable[[Node], float]) -> None:
        self._key = key
        self._leaves = LeafHeap()

    def offer(self, leaf: Node) -> None:
        self._leaves.push(self._key(leaf), leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()


def least_recently_used() -> ByKey:
    """The leaf that was used longest ago goes first.

    A prefix is used whenever what continues it is, so interior nodes need no time stamps of their own.
    """
    return ByKey(lambda leaf: leaf.stamp)


def first_in_first_out() -> ByKey:
    """The leaf that was computed longest ago goes first, however often it was used. For comparison."""
    return ByKey(lambda leaf: leaf.created)


def least_urgent() -> ByKey:
    """The leaf goes first whose last request had the largest ``priority``.

    As in the waiting queue of that name, the smallest number is the most urgent.
    """
    return ByKey(lambda leaf: 0 if leaf.hint is None else -leaf.hint.priority)
