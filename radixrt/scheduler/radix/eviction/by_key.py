"""Eviction policies that order leaves by a key on the node: LRU, FIFO, priority."""

from collections.abc import Callable

from radixrt.scheduler.radix.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy
from radixrt.scheduler.radix.node import Node


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
