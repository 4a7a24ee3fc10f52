"""A node of the radix tree, and why it is made of bytes.

A tree can have a million nodes, most of them short, so what counts is what *one* costs. Ids are packed
(int32, as on the wire) into ``bytes``: half of what numpy arrays of a page take, an edge
that matches is one ``memcmp`` (``bytes.startswith``), and an edge of one page is its own key in its parent's
dictionary. The garbage collector does not track nodes (``gc=False``): a full collection over a million of
them would stop the scheduler for a tenth of a second. So the tree itself has to cut the cycles of parents and children,
and does when it removes a node.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.hint import Hint
from radixrt.scheduler.radix.page_allocator import Pages

ID_BYTES = 4
"""Of a token id and of a page id."""

Packed = bytes | memoryview
"""Packed int32 ids. A long part of a longer edge is a view of it, see :func:`part_of`."""

_SHORTEST_VIEW = 4096
"""Bytes. A view costs 200 bytes of its own; what is shorter is copied in less time than a view is made."""

_NO_CHILDREN: Mapping[bytes, Any] = MappingProxyType({})


class Node(msgspec.Struct, gc=False, eq=False):
    """One edge of the tree and the children below it."""

    parent: "Node | None"
    """None: a root, or no longer in the tree."""
    edge: Packed
    """Tokens of the edge above this node, packed; whole pages."""
    page_ids: Packed
    """One page id for each page of ``edge``, packed."""
    children: "Mapping[bytes, Node]" = _NO_CHILDREN
    """By the packed tokens of the first page. Leaves share one that is empty."""
    lock_count: int = 0
    """Sequences and leases that use this node or one below it."""
    lease_count: int = 0
    """Of those, the leases."""
    stamp: int = 0
    """When it was last used, on the tree's own clock."""
    created: int = 0
    """When its pages came into the tree, on the same clock; of an edge joined from several, the last of them."""
    traffic_class: int = 0
    """What the eviction policy took the request for that used it last."""
    hint: Hint | None = None
    """What clients have said of it; None for most."""

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
        """Take over what eviction policies know of ``other``, of which this node has been a part."""
        self.stamp, self.created = other.stamp, other.created
        self.traffic_class, self.hint = other.traffic_class, other.hint

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf. Roots have no parent, removed nodes have lost theirs."""
        return self.lock_count == 0 and not self.children and self.parent is not None

    def __lt__(self, other: "Node") -> bool:
        """Any order will do: only heaps ask, and only where all else is equal."""
        return id(self) < id(other)

    def __repr__(self) -> str:
        return f"<Node of {self.num_pages} pages, {len(self.children)} children, {self.lock_count} locks>"

    def hang(self, key: bytes, child: "Node") -> None:
        """Take ``child``, whose first page is ``key``, in the place of any other with that first page."""
        if isinstance(self.children, dict):
            self.children.pop(key, None)  # a dictionary would keep the old key, and its memory
            self.children[key] = child
        else:
            self.children = {key: child}
        child.parent = self

    def drop(self, key: bytes) -> None:
        """Remove the child whose first page is ``key``."""
        assert isinstance(self.children, dict)
        del self.children[key]
        if not self.children:
            self.children = _NO_CHILDREN

    def retire(self) -> None:
        """Cut all ties to the tree: nothing would ever collect a cycle. Who still knows the node keeps little alive."""
        self.parent = None
        self.children = _NO_CHILDREN
        self.edge = self.page_ids = b""


def part_of(packed: Packed, start: int, stop: int) -> Packed:
    """Bytes ``start`` to ``stop`` of packed ids.

    Cutting a page from a long edge must not copy the edge, so a long part is a view, unless it is less
    than half of what it would keep in memory. Cutting n pages off one by one so copies fewer than 2n.
    """
    view = memoryview(packed)[start:stop]
    kept_alive = view.obj
    assert isinstance(kept_alive, bytes)
    if len(view) < _SHORTEST_VIEW or 2 * len(view) < len(kept_alive):
        return bytes(view)
    return view


def common_length(edge: Packed, packed: bytes, start: int) -> int:
    """Length in bytes of the longest common prefix of ``edge`` and ``packed[start:]``, in whole ids.

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
