"""Summarises the radix tree: its largest prefixes, and the sums below them.

The sums need a walk over all nodes. A tree may have a million of them, so the walk takes up to half a second, in which no
step would be planned. So the walk is a generator that stops every few milliseconds and continues after the next step. The
tree changes meanwhile; the sums of a large tree under load are approximate, those of an idle tree exact. The walk keeps
only the nodes that it shows and the children still to be visited.
"""

import heapq
import time
from collections.abc import Callable, Generator
from itertools import count
from typing import NamedTuple

from radixrt.messages.cache_tree import CacheNamespace, CacheTree, CacheTreeNode
from radixrt.messages.calls import CacheTreeCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RetentionLevel, split_salt
from radixrt.scheduler.radix.hint import LEVELS
from radixrt.scheduler.radix.node import ID_BYTES, Node
from radixrt.scheduler.radix.tree import RadixTree

SLICE_S = 0.002
"""Longest time of one piece of the walk, to within NODES_PER_LOOK nodes."""

NODES_PER_LOOK = 256
"""Nodes visited between two looks at the clock."""

FIRST_TOKENS = 32
"""Of an edge, shown in the view."""

SMALLEST_SHARE = 1 / 1000
"""Share of the tree's pages that a node must hold to be shown, so that no level shows more than a thousand nodes."""

_NAMES: dict[int, RetentionLevel] = {level: name for name, level in LEVELS.items()}


class _Sum(NamedTuple):
    """Sums over a node and all nodes below it."""

    pages: int
    nodes: int
    stamp: int
    """The last use of any of them."""


NOTHING = _Sum(0, 0, 0)

Slices = Generator[None, None, CacheTree]
"""Stops after each slice; returns the view."""


class TreeView:
    """One walk, for one call of ``GET /v1/cache/tree``."""

    def __init__(
        self, tree: RadixTree, call: CacheTreeCall, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tree = tree
        self._depth, self._children = call.depth, call.children
        self._namespace = call.namespace
        self._least_pages = SMALLEST_SHARE * tree.num_pages
        self._clock = clock
        self._visited = 0
        self._slice_end = 0.0
        self._tickets = count()  # breaks ties, so that views are never compared

    def slices(self) -> Slices:
        """Walk the tree; see :data:`Slices`."""
        largest: list[tuple[int, int, CacheNamespace]] = []
        total = NOTHING
        self._begin_slice()
        for salt, root in list(self._tree.roots().items()):
            name, own = split_salt(salt)
            if self._namespace not in (None, name):
                continue
            children, below = yield from self._below(root, self._depth)
            total = _added(total, below)
            if below.nodes:
                tokens = below.pages * self._tree.page_size
                namespace = CacheNamespace(
                    namespace=name, salted=bool(own), total_tokens=tokens, total_nodes=below.nodes, children=children
                )  # fmt: skip
                heapq.heappush(largest, (tokens, -next(self._tickets), namespace))
            if len(largest) > self._children:
                heapq.heappop(largest)
        is_whole = self._namespace is None
        return CacheTree(
            page_size=self._tree.page_size,
            total_tokens=(self._tree.num_pages if is_whole else total.pages) * self._tree.page_size,
            total_nodes=self._tree.num_nodes if is_whole else total.nodes,
            namespaces=[namespace for *_, namespace in sorted(largest, reverse=True)],
        )

    def _below(
        self, parent: Node, depth: int
    ) -> Generator[None, None, tuple[list[CacheTreeNode], _Sum]]:
        """The largest children of a node, and the sum of all of them."""
        if depth <= 0:
            return [], (yield from self._sum_below(parent))
        largest: list[tuple[int, int, CacheTreeNode]] = []
        total = NOTHING
        for node in list(parent.children.values()):
            if self._slice_is_over():
                yield
                self._begin_slice()
            if node.parent is None:
                continue  # it has left the tree since
            children: list[CacheTreeNode] = []
            of_node = _Sum(len(node.page_ids) // ID_BYTES, 1, node.stamp)
            if node.children:
                children, below = yield from self._below(node, depth - 1)
                of_node = _added(of_node, below)
            total = _added(total, of_node)
            if of_node.pages >= self._least_pages:
                shown = self._shown(node, of_node, children)
                heapq.heappush(largest, (of_node.pages, -next(self._tickets), shown))
            if len(largest) > self._children:
                heapq.heappop(largest)
        return [node for *_, node in sorted(largest, reverse=True)], total

    def _sum_below(self, parent: Node) -> Generator[None, None, _Sum]:
        pages = nodes = stamp = 0
        pending = list(parent.children.values())
        while pending:
            if self._slice_is_over():
                yield
                self._begin_slice()
            node = pending.pop()
            pages += len(node.page_ids) // ID_BYTES
            nodes += 1
            stamp = max(stamp, node.stamp)
            if node.children:
                pending.extend(node.children.values())
        return _Sum(pages, nodes, stamp)

    def _slice_is_over(self) -> bool:
        """Count a node; whether it is time to stop."""
        self._visited += 1
        is_look = self._visited % NODES_PER_LOOK == 0
        return is_look and time.perf_counter() >= self._slice_end

    def _begin_slice(self) -> None:
        self._slice_end = time.perf_counter() + SLICE_S

    def _shown(self, node: Node, total: _Sum, children: list[CacheTreeNode]) -> CacheTreeNode:
        size, now = self._tree.page_size, self._clock()
        hint = None if node.hint is None else node.hint.at(now)
        return CacheTreeNode(
            first_token_ids=pack_ids(node.tokens[:FIRST_TOKENS]),
            num_tokens=node.num_pages * size,
            total_tokens=total.pages * size,
            total_nodes=total.nodes,
            locked=node.lock_count > 0,
            pinned=node.lease_count > 0,
            idle_s=max(0.0, now - total.stamp * 1e-9),
            retention="default" if hint is None else _NAMES[hint.level],
            children=children,
        )


def _added(one: _Sum, other: _Sum) -> _Sum:
    return _Sum(one.pages + other.pages, one.nodes + other.nodes, max(one.stamp, other.stamp))
