"""A node of the radix tree, with its ids packed into bytes.

A tree can have a million nodes, most of them short, so the memory of one node matters. Ids are
packed (int32, as on the wire) into ``bytes``, which take half the memory of numpy arrays; an edge
is compared by one ``memcmp`` (``bytes.startswith``); an edge of one page is its own key in its
parent's dictionary. The garbage collector does not track nodes (``gc=False``): a full collection
over a million of them would stop the scheduler for a tenth of a second. So the tree itself breaks
the cycles of parents and children when it removes a node.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.hint import Hint
from radixrt.scheduler.radix.page_allocator import Pages

ID_BYTES = 4
"""Bytes of a token id, and of a page id."""

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
    namespace: str = ""
    """The namespace of the cache salt; empty without declared keys."""

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

    def inherit(self, other: "Node") -> None:
        """Copy the fields about use from ``other``, of which this node was a part."""
        self.stamp, self.created, self.hint = other.stamp, other.created, other.hint
        self.namespace = other.namespace
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
