"""A node of the radix tree, with its cache hints, and its ids packed into bytes; and the result of
a lookup.

A tree can have a million nodes, most of them short, so the memory of one node matters. Ids are
packed (int32, as on the wire) into ``bytes``, which take half the memory of numpy arrays; an edge
is compared by one ``memcmp`` (``bytes.startswith``); an edge of one page is its own key in its
parent's dictionary. Most nodes have no :class:`Hint`. The garbage collector does not track nodes
(``gc=False``): a full collection over a million of them would stop the scheduler for a tenth of a
second. So the tree itself breaks the cycles of parents and children when it removes a node.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from radixrt.messages.ids import ID_BYTES, TokenIds, unpack_ids
from radixrt.messages.requests import RetentionLevel
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.return_hazards import SHARED, Visit

NONE, DEFAULT, HIGH = 0, 1, 2
"""Retention levels; the lower ones are evicted first."""

LEVELS: dict[RetentionLevel, int] = {"none": NONE, "default": DEFAULT, "high": HIGH}


class Hint(msgspec.Struct, frozen=True, gc=False):
    """Hints for one node. Times are in seconds on the tree's clock."""

    level: int = DEFAULT
    expires: float | None = None
    """Time at which ``level`` becomes DEFAULT again; None: never."""
    next_use: float | None = None
    """Time at which a client expects to continue from the end of this node."""
    priority: int = 0
    """The priority of the request that used the node last, for policies that order by it; the
    smallest is the most urgent."""

    @property
    def says_something(self) -> bool:
        return self != NO_HINT

    def valid_at(self, now: float) -> "Hint | None":
        """The part that still holds at ``now``: not an expired level, not a next use that is
        due."""
        hint = self
        if hint.expires is not None and hint.expires <= now:
            hint = Hint(DEFAULT, None, hint.next_use, hint.priority)
        if hint.next_use is not None and hint.next_use <= now:
            hint = hint.with_next_use(None)
        return hint if hint.says_something else None

    def next_change(self) -> float | None:
        """Time at which :meth:`valid_at` changes; None: never."""
        return min((t for t in (self.expires, self.next_use) if t is not None), default=None)

    def with_next_use(self, next_use: float | None) -> "Hint":
        return Hint(self.level, self.expires, next_use, self.priority)


NO_HINT = Hint()


def is_kept_alike(one: Hint | None, other: Hint | None) -> bool:
    """Whether two hints agree in all but the next use."""
    if one is other:
        return True
    a, b = one or NO_HINT, other or NO_HINT
    return (a.level, a.expires, a.priority) == (b.level, b.expires, b.priority)


def earliest_next_use(one: Hint | None, other: Hint | None, now: float) -> float | None:
    """The earlier of two next uses that is not due yet."""
    uses = [hint.next_use for hint in (one, other) if hint is not None]
    return min((use for use in uses if use is not None and use > now), default=None)


Packed = bytes | memoryview
"""Packed int32 ids. A long part of a longer edge is a view of it, see :func:`part_of`."""

_SHORTEST_VIEW = 4096
"""Bytes. A view takes 200 bytes of its own, and copying a shorter part is faster than making a
view."""

_NO_CHILDREN: Mapping[bytes, Any] = MappingProxyType({})


class SequenceEnd(NamedTuple):
    """The last request whose tokens in the tree end at the end of a node."""

    seq_id: int
    tenant: str
    """Name of its key."""
    tail: bytes = b""
    """Its packed tokens after its last full page, which are not in the tree."""


class Node(msgspec.Struct, gc=False, eq=False):
    """One edge of the tree and the children below it."""

    parent: "Node | None"
    """None: a root, or no longer in the tree."""
    edge: Packed
    """Tokens of the edge above this node, packed; whole pages."""
    page_ids: Packed
    """One page id for each page of ``edge``, packed."""
    children: "Mapping[bytes, Node]" = _NO_CHILDREN
    """The children by the packed tokens of their first page. Leaves share one that is empty."""
    lock_count: int = 0
    """Sequences and leases that use this node or one below it."""
    lease_count: int = 0
    """The leases among them."""
    stamp: int = 0
    """Time of the last use that ended here, on the tree's clock."""
    last_used: int = 0
    """Time of the last use of this node or one below it, on the same clock."""
    uses: int = 0
    """Times that a sequence or lease has locked this node or one below it."""
    pages_below: int = 0
    """Pages of all nodes below this one."""
    nodes_below: int = 0
    created: int = 0
    """Time at which its pages entered the tree, on the same clock; of a joined edge, that of the
    last part."""
    hint: Hint | None = None
    """Clients' hints; None for most nodes."""
    end: SequenceEnd | None = None
    """None: no request has ended here."""
    visit: Visit | None = None
    """The last request that ended here, or further down before it was evicted; None where no policy
    learns from requests."""
    namespace: str = ""
    """The tenant of the cache root; empty without declared keys."""

    @property
    def num_pages(self) -> int:
        return len(self.page_ids) // ID_BYTES

    @property
    def tokens(self) -> TokenIds:
        """Tokens of the edge above this node: [num_pages * page_size], read-only."""
        return np.frombuffer(self.edge, dtype=np.int32)

    @property
    def pages(self) -> Pages:
        """One page id for each page of ``tokens``: [num_pages], read-only."""
        return np.frombuffer(self.page_ids, dtype=np.int32)

    def path(self) -> "Iterator[Node]":
        """This node and all above it, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def num_own_pages(self) -> int:
        """Pages of the prefix behind the last node with several continuations."""
        own = takewhile(lambda node: node.visit is not SHARED, self.path())
        return sum(node.num_pages for node in own)

    def note_visit(self, visit: Visit | None) -> None:
        """Note the last request that used the prefix, unless it has had several continuations."""
        if visit is not None and self.visit is not SHARED:
            self.visit = visit

    def prefix_pages(self) -> Pages:
        """The pages of the whole prefix that ends with this node: [n]."""
        return np.concatenate([node.pages for node in self.path()][::-1])

    def inherit(self, other: "Node") -> None:
        """Copy the fields about use from ``other``, of which this node was a part."""
        self.stamp, self.created, self.hint = other.stamp, other.created, other.hint
        self.namespace, self.visit = other.namespace, other.visit
        self.last_used, self.uses = other.last_used, other.uses

    @property
    def is_evictable(self) -> bool:
        """Whether it is an unlocked leaf. Roots and removed nodes have no parent."""
        return self.lock_count == 0 and not self.children and self.parent is not None

    def __lt__(self, other: "Node") -> bool:
        """An arbitrary order, for heaps whose keys are equal."""
        return id(self) < id(other)

    def __repr__(self) -> str:
        return f"<Node of {self.num_pages} pages, {len(self.children)} children, {self.lock_count} locks>"

    @property
    def key(self) -> bytes:
        """Its key in its parent's dictionary: the packed tokens of its first page."""
        return bytes(self.edge[: len(self.edge) // self.num_pages])

    def add_child(self, child: "Node") -> None:
        """Add ``child`` under its key, in place of any other child with that key."""
        key = child.key
        if isinstance(self.children, dict):
            self.children.pop(key, None)  # a dictionary would keep the old key, and its memory
            self.children[key] = child
        else:
            self.children = {key: child}
        child.parent = self

    def newest_keys(self) -> Iterator[bytes]:
        """The keys of the children, the newest first."""
        return reversed(self.children) if isinstance(self.children, dict) else iter(())

    def remove_child(self, child: "Node") -> None:
        """Remove a child."""
        assert isinstance(self.children, dict)
        del self.children[child.key]
        if not self.children:
            self.children = _NO_CHILDREN

    def count_below(self, pages: int, nodes: int) -> None:
        """Add to the sums of what is below this node and all above it."""
        above: Node | None = self
        while above is not None:
            above.pages_below += pages
            above.nodes_below += nodes
            above = above.parent

    def cut(self, start: int, stop: int) -> tuple[Packed, Packed]:
        """Packed tokens and page ids of the pages ``start`` to ``stop`` of the edge."""
        page_bytes = len(self.edge) // self.num_pages
        return (
            part_of(self.edge, start * page_bytes, stop * page_bytes),
            part_of(self.page_ids, start * ID_BYTES, stop * ID_BYTES),
        )

    def detach(self) -> None:
        """Drop all references to and from the tree, because nothing would collect a cycle."""
        self.parent = None
        self.children = _NO_CHILDREN
        self.edge = self.page_ids = b""


def part_of(packed: Packed, start: int, stop: int) -> Packed:
    """Bytes ``start`` to ``stop`` of packed ids.

    Splitting a page from a long edge must not copy the edge, so a long part is a view, unless it is
    less than half of the bytes that the view would keep in memory. So removing n pages one by one
    copies fewer than 2n.
    """
    view = memoryview(packed)[start:stop]
    kept_alive = view.obj
    assert isinstance(kept_alive, bytes)
    if len(view) < _SHORTEST_VIEW or 2 * len(view) < len(kept_alive):
        return bytes(view)
    return view


def common_length(edge: Packed, packed: bytes, start: int) -> int:
    """Length in bytes of the longest common prefix of ``edge`` and ``packed[start:]``, in whole
    ids.

    Compares ever longer pieces, so that an early difference in a long edge is found early.
    """
    length, done, piece = min(len(edge), len(packed) - start), 0, 1 << 10
    while done < length:
        count = min(piece, length - done) // ID_BYTES
        ours = np.frombuffer(edge, np.int32, count, done)
        differs = ours != np.frombuffer(packed, np.int32, count, start + done)
        first = int(differs.argmax())
        if differs[first]:
            return done + first * ID_BYTES
        done += count * ID_BYTES
        piece *= 4
    return length


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
