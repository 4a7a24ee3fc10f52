"""Shares of the cache: the pages of each key's namespace in the radix tree, and the namespaces that
have more than their share.

A share is no reservation and no hard bound. Free memory is anybody's. When pages have to be
evicted, the namespace furthest above its share loses its least recently used ones first, until it
is back at its share. Hints and waiting requests do not protect them.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.radix.eviction import LeafHeap
from radixrt.scheduler.radix.node import Node


@dataclass(slots=True, eq=False)
class Share:
    """The pages of one namespace."""

    num_pages: int = 0
    """Pages in the tree, locked ones included."""
    max_pages: int | None = None
    """None: no bound."""
    leaves: LeafHeap | None = None
    """The leaves that may be evicted; None if there never was a bound."""

    @property
    def num_excess(self) -> int:
        """Pages above the share."""
        return 0 if self.max_pages is None else max(0, self.num_pages - self.max_pages)


class Shares:
    """The namespaces of declared keys, whose names are not empty."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._above: LazyHeap[str] = LazyHeap()
        """Namespaces above their shares, the furthest first."""

    def for_namespace(self, namespace: str) -> Share:
        if namespace not in self._shares:
            self._shares[namespace] = Share()
        return self._shares[namespace]

    def all(self) -> dict[str, Share]:
        """All shares, by namespace."""
        return self._shares

    def count(self, namespace: str, num_pages: int) -> None:
        """Pages of a namespace have entered the tree; a negative number: have left it."""
        if namespace:
            self.for_namespace(namespace).num_pages += num_pages
            self.place(namespace)

    def limit(self, namespace: str, max_pages: int | None) -> bool:
        """Set the share of a namespace. True: its leaves have to be offered, because it never had
        one."""
        share = self.for_namespace(namespace)
        if share.max_pages == max_pages:
            return False
        share.max_pages = max_pages
        self.place(namespace)
        if share.leaves is not None:
            return False
        share.leaves = _LeavesByUse()
        return share.num_pages > 0

    def place(self, namespace: str) -> None:
        """Give a namespace its place in the order, after a change of its pages or its bound."""
        share = self._shares[namespace]
        if share.max_pages is not None and share.num_excess:
            self._above.place(namespace, -share.num_pages / max(share.max_pages, 1))
        else:
            self._above.discard(namespace)

    def offer(self, leaf: Node) -> None:
        """A leaf may be evicted from now on, or was used again."""
        if leaf.namespace and (leaves := self._shares[leaf.namespace].leaves) is not None:
            leaves.push(leaf.stamp, leaf)

    def take(self, count: int) -> Iterator[tuple[Node, int]]:
        """Take the leaves from which up to ``count`` pages above the shares are evicted, each with
        the most pages to evict from it.

        The caller evicts and counts them (:meth:`count`) before it takes the next leaf.
        """
        locked = []
        while count > 0 and len(self._above):
            namespace = self._above.first()
            share = self._shares[namespace]
            begin = share.num_pages
            end = begin - min(share.num_excess, count)
            assert share.leaves is not None
            while share.num_pages > end and (leaf := share.leaves.pop()) is not None:
                yield leaf, share.num_pages - end
            if share.num_pages > end:  # the rest is locked
                self._above.discard(namespace)
                locked.append(namespace)
            count -= begin - share.num_pages
        for namespace in locked:
            self.place(namespace)


class _LeavesByUse(LeafHeap):
    """Least recently used first. A leaf whose stamp was changed by a hint gets its new place when
    its entry comes to the top."""

    def peek(self) -> Node | None:
        while self._heap:
            _, stamp, leaf = self._heap[0]
            if not leaf.is_evictable:
                heapq.heappop(self._heap)
            elif leaf.stamp != stamp:
                heapq.heapreplace(self._heap, (leaf.stamp, leaf.stamp, leaf))
            else:
                return leaf
        return None

    @staticmethod
    def _is_live(leaf: Node, stamp: int) -> bool:
        return leaf.is_evictable
