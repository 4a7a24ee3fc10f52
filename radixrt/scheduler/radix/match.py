"""The result of a lookup in the radix tree: the longest prefix that is cached."""

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.radix.node import ID_BYTES, Node
from radixrt.scheduler.radix.page_allocator import Pages


class Match(NamedTuple):
    """The longest prefix found: it ends inside (or at the end of) the edge above ``node``."""

    node: Node
    num_pages: int
    """Pages of the whole prefix."""
    pages_in_edge: int
    """How many pages of ``node``'s own edge belong to the prefix."""

    @property
    def pages(self) -> Pages:
        """Page ids of the prefix, from its start: [num_pages], read-only."""
        edges = [node.page_ids for node in self.node.path()]
        edges[0] = edges[0][: self.pages_in_edge * ID_BYTES]
        return unpack_ids(b"".join(edges[::-1]))

    @property
    def num_unpinned_pages(self) -> int:
        """Pages that are under no lease yet."""
        return self._num_pages(lambda node: node.lease_count == 0)

    @property
    def num_unlocked_pages(self) -> int:
        """Pages that are evictable until the prefix is locked."""
        return self._num_pages(lambda node: node.lock_count == 0)

    def _num_pages(self, counts: Callable[[Node], bool]) -> int:
        """Pages on the nodes that count, which are the last ones: a lock or lease holds all nodes
        above its own."""
        counted = list(takewhile(counts, self.node.path()))
        beyond = self.node.num_pages - self.pages_in_edge if counted else 0
        return sum(node.num_pages for node in counted) - beyond
