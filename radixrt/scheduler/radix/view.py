"""Shows the radix tree: the nodes with the most pages in and below them.

Each node counts what is below it, so a view visits only the nodes that it shows and their children.
A node may have a hundred thousand children, so the search is a generator that stops every few
milliseconds and continues after the next step. The tree changes meanwhile: the numbers of a view
under load are of slightly different times.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from itertools import count, islice

from radixrt.base.errors import RequestError
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.cache_tree import CacheNamespace, CacheTree, CacheTreeNode
from radixrt.messages.calls import CacheTreeCall
from radixrt.messages.ids import ID_BYTES, pack_ids
from radixrt.messages.requests import RetentionLevel
from radixrt.scheduler.radix.key_ids import tokens_of
from radixrt.scheduler.radix.node import LEVELS, Node
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.tree import RadixTree

SLICE_S = 0.002
"""Longest time of one piece of the search, to within NODES_PER_LOOK nodes."""

NODES_PER_LOOK = 2048
"""Nodes visited between two looks at the clock: some 0.2 ms."""

FIRST_TOKENS = 32
"""Tokens of an edge that the view shows."""

SMALLEST_SHARE = 1 / 1000
"""Share of the shown pages that makes a node large enough to be shown."""

FEWEST_CHILDREN = 20
"""Shown of a node without so many large ones: the largest, or of thousands the largest of a
sample."""

MAX_AWAITED = 1000
"""Nodes with waiting sequences that a view looks at."""

MAX_KNOWN = 20_000
"""Nodes of the last views that can be asked about."""

_NAMES: dict[int, RetentionLevel] = {level: name for name, level in LEVELS.items()}

Slices = Generator[None, None, CacheTree]
"""Stops after each slice; returns the view."""


class KnownNodes:
    """The nodes of the last views, by the ids of their last pages.

    A page is in the tree at most once. A node keeps its end, and so its id, when edges are split
    and joined.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}

    def add(self, node: Node) -> int:
        """Remember a node; returns its id."""
        node_id = int(node.pages[-1])
        self._nodes.pop(node_id, None)  # becomes the newest
        self._nodes[node_id] = node
        if len(self._nodes) > MAX_KNOWN:
            del self._nodes[next(iter(self._nodes))]
        return node_id

    def find(self, node_id: int) -> Node:
        """Raises:
        RequestError: it has left the tree, or was in none of the last views.
        """
        node = self._nodes.get(node_id)
        if node is None or node.parent is None or int(node.pages[-1]) != node_id:
            raise RequestError("This node has left the radix tree.", status=404)
        return node


class TreeView:
    """One search, for one CacheTreeCall."""

    def __init__(
        self,
        tree: RadixTree,
        call: CacheTreeCall,
        clock: Callable[[], float] = time.monotonic,
        known: KnownNodes | None = None,
        states: KeptStates | None = None,
    ) -> None:
        self._tree = tree
        self._states = states
        self._call = call
        self._clock = clock
        self._known = known or KnownNodes()
        self._largest: list[tuple[int, int, Node, int, list[CacheTreeNode]]] = []
        """Heap of the nodes to show next: minus their pages, ticket, node, level, children of the
        parent."""
        self._tickets = count()  # breaks ties, so that nodes are never compared
        self._waiting: Mapping[Node, int] = Counter()
        self._least_bytes = 0.0
        self._slice_end = 0.0

    def slices(self) -> Slices:
        """Search the tree; see :data:`Slices`."""
        self._begin_slice()
        self._waiting = self._count_waiting()
        start = self._start()
        if start is None:
            roots, pages, nodes = yield from self._largest_roots()
            self._least_bytes = SMALLEST_SHARE * pages * ID_BYTES
            namespaces = [self._namespace(root) for root in roots]
            for root, namespace in zip(roots, namespaces, strict=True):
                yield from self._offer_children(root, 1, namespace.children)
            way: list[Node] = []
        else:
            *way, root = [*start.path()][1:]
            pages, nodes = _num_pages(start), 1 + start.nodes_below
            self._least_bytes = SMALLEST_SHARE * pages * ID_BYTES
            namespaces = [self._namespace(root)]
            self._offer(start, 1, namespaces[0].children)
        above = [self._shown(node, []) for node in reversed(way)]
        yield from self._show()
        if start is None and self._call.namespace is None:  # of this moment
            pages, nodes = self._tree.num_pages, self._tree.num_nodes
        size = self._tree.page_size
        return CacheTree(
            page_size=size,
            total_tokens=pages * size,
            total_nodes=nodes,
            namespaces=namespaces,
            above=above,
        )

    def _start(self) -> Node | None:
        """The node whose part of the tree is shown, if it is there and belongs to the caller."""
        if self._call.below is None:
            return None
        try:
            start = self._known.find(self._call.below)
        except RequestError:
            return None
        *_, root = start.path()
        return start if self._is_own(self._tree.root_of(root)) else None

    def _is_own(self, name: CacheRoot) -> bool:
        return self._call.namespace in (None, name.tenant)

    def _largest_roots(self) -> Generator[None, None, tuple[list[Node], int, int]]:
        """The largest roots, and the sums of pages and nodes below all roots."""
        largest: list[tuple[int, int, Node]] = []
        pages = nodes = 0
        for number, (name, root) in enumerate(list(self._tree.roots().items())):
            if number % NODES_PER_LOOK == 0 and self._slice_is_over():
                yield
                self._begin_slice()
            if not root.nodes_below or not self._is_own(name):
                continue
            pages += root.pages_below
            nodes += root.nodes_below
            heapq.heappush(largest, (root.pages_below, -next(self._tickets), root))
            if len(largest) > self._call.children:
                heapq.heappop(largest)
        return [root for *_, root in sorted(largest, reverse=True) if root.children], pages, nodes

    def _show(self) -> Generator[None, None, None]:
        """Show nodes, the largest first, until there are enough."""
        left = self._call.most
        while self._largest and left:
            *_, node, level, siblings = heapq.heappop(self._largest)
            if node.parent is None or len(siblings) >= self._call.children:
                continue  # it has left the tree since, or its parent shows enough
            children: list[CacheTreeNode] = []
            siblings.append(self._shown(node, children))
            left -= 1
            if node.children:
                yield from self._offer_children(node, level + 1, children)

    def _offer_children(
        self, parent: Node, level: int, shown: list[CacheTreeNode]
    ) -> Generator[None, None, None]:
        """Note the children of a node that are large enough to be shown, or the largest of small
        ones."""
        if level > self._call.depth:
            return
        children, least = list(parent.children.values()), self._least_bytes
        large: list[Node] = []
        for start in range(0, len(children), NODES_PER_LOOK):
            if self._slice_is_over():
                yield
                self._begin_slice()
            # spelled out: most of a hundred thousand children are too small
            large += [
                node for node in children[start : start + NODES_PER_LOOK]
                if len(node.page_ids) + ID_BYTES * node.pages_below >= least
            ]  # fmt: skip
        if len(large) < min(FEWEST_CHILDREN, len(children)):
            some = children[:: 1 + len(children) // NODES_PER_LOOK]
            large = heapq.nlargest(FEWEST_CHILDREN, dict.fromkeys([*large, *some]), key=_num_pages)
        for node in large:
            if node.parent is not None:  # else it has left the tree since
                self._offer(node, level, shown)

    def _offer(self, node: Node, level: int, siblings: list[CacheTreeNode]) -> None:
        entry = (-_num_pages(node), next(self._tickets), node, level, siblings)
        heapq.heappush(self._largest, entry)

    def _slice_is_over(self) -> bool:
        return time.perf_counter() >= self._slice_end

    def _begin_slice(self) -> None:
        self._slice_end = time.perf_counter() + SLICE_S

    def _count_waiting(self) -> Counter[Node]:
        """Waiting sequences by each node on the paths of their cached prefixes."""
        waiting: Counter[Node] = Counter()
        for end, num_waiting in islice(self._tree.policy.awaited(), MAX_AWAITED):
            for node in end.path():
                waiting[node] += num_waiting
        return waiting

    def _namespace(self, root: Node) -> CacheNamespace:
        name = self._tree.root_of(root)
        return CacheNamespace(
            namespace=name.tenant,
            salted=bool(name.salt),
            adapter=name.adapter,
            total_tokens=root.pages_below * self._tree.page_size,
            total_nodes=root.nodes_below,
            num_children=len(root.children),
            children=[],
        )

    def _shown(self, node: Node, children: list[CacheTreeNode]) -> CacheTreeNode:
        size, now = self._tree.page_size, self._clock()
        hint = None if node.hint is None else node.hint.valid_at(now)
        return CacheTreeNode(
            node=self._known.add(node),
            first_token_ids=pack_ids(tokens_of(node.tokens[:FIRST_TOKENS])),
            num_tokens=node.num_pages * size,
            total_tokens=_num_pages(node) * size,
            total_nodes=1 + node.nodes_below,
            num_children=len(node.children),
            uses=node.uses,
            running=node.lock_count - node.lease_count,
            waiting=self._waiting[node],
            leases=node.lease_count,
            states=self._states.count(node.pages) if self._states else 0,
            locked=node.lock_count > 0,
            pinned=node.lease_count > 0,
            idle_s=idle_seconds(node, now),
            retention="default" if hint is None else _NAMES[hint.level],
            children=children,
        )


def idle_seconds(node: Node, now: float) -> float:
    """Seconds since the last use of a node or one below it; 0 while a sequence uses it."""
    is_running = node.lock_count > node.lease_count
    return 0.0 if is_running else max(0.0, now - node.last_used * 1e-9)


def _num_pages(node: Node) -> int:
    """Pages of a node and all below it."""
    return node.num_pages + node.pages_below
