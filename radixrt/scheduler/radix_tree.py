"""The radix tree over token ids that holds the KV cache.

An edge carries token ids and the ids of the pages that hold their K and V; both are aligned to whole
pages, so two prompts share a prefix up to the last full page they have in common. The idea is
RadixAttention's (Zheng et al., "SGLang", 2024, section 3); two things differ: tokens enter the tree when
the step that computes them is *planned*, and eviction trims leaves page by page from a priority queue.

Every lookup of one namespace starts at its own root, so different cache salts never share a page.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from radixrt.messages import TokenIds
from radixrt.scheduler.eviction.lru import LeafLRU
from radixrt.scheduler.eviction.policy import EvictionPolicy
from radixrt.scheduler.node import Node
from radixrt.scheduler.page_allocator import NO_PAGES, Pages

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix found: it ends inside (or at the end of) the edge above ``node``."""

    node: Node
    num_pages: int
    """Pages of the whole prefix."""
    pages_in_edge: int
    """How many pages of ``node``'s own edge belong to the prefix."""


class RadixTree:
    """Prefixes of token ids and the KV pages that hold them.

    Args:
        policy: says what is evicted first; default: the leaf that was used longest ago.
        clock: seconds from any fixed moment; the stamps on the nodes follow it.
    """

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self.policy: EvictionPolicy = policy or LeafLRU()
        self._roots: dict[str, Node] = {}
        self._salts: dict[Node, str] = {}  # the other way round
        self._clock = clock
        self._last_stamp = 0
        self.num_pages = 0
        """Pages in the tree."""
        self.num_locked_pages = 0
        """Of those, on the way from a root to a locked node."""
        self.num_nodes = 0
        self.generation = 0
        """Grows whenever a lookup may give another answer than before."""

    @property
    def num_evictable_pages(self) -> int:
        return self.num_pages - self.num_locked_pages

    # ------------------------------------------------------------ lookup

    def match(self, tokens: TokenIds, salt: str = "") -> Match | None:
        """Find the longest cached prefix of ``tokens``, in whole pages. Changes nothing."""
        root = self._roots.get(salt)
        return None if root is None else self._match_below(root, tokens)

    def _match_below(self, node: Node, tokens: TokenIds) -> Match:
        size = self.page_size
        num_pages, pages_in_edge = 0, len(node.pages)
        while True:
            rest = tokens[num_pages * size :]
            child = node.children.get(rest[:size].tobytes())
            if child is None:
                return Match(node, num_pages, pages_in_edge)
            node = child
            pages_in_edge = _common_length(child.tokens, rest) // size
            num_pages += pages_in_edge
            if pages_in_edge < len(child.pages):
                return Match(node, num_pages, pages_in_edge)

    def pages_of(self, match: Match) -> Pages:
        """Page ids of a matched prefix, from its start."""
        edges = [match.node.pages[: match.pages_in_edge]]
        node = match.node.parent
        while node is not None:
            edges.append(node.pages)
            node = node.parent
        return np.concatenate(edges[::-1])

    # ------------------------------------------------------------ locks

    def lock_match(self, match: Match) -> Node:
        """Lock a prefix that was just found; returns the node at whose end it ends."""
        node = match.node
        if match.pages_in_edge < len(node.pages):
            node = self._split(node, match.pages_in_edge)
        self.lock(node)
        return node

    def lock_root(self, salt: str = "") -> Node:
        """Lock the empty prefix of a namespace."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, _NO_TOKENS, NO_PAGES)
            self._salts[root] = salt
        self.lock(root)
        return root

    def lock(self, node: Node) -> None:
        """Keep a prefix from eviction until :meth:`unlock`."""
        self._touch(node)
        self._lock_path(node, None)

    def move_lock(self, old: Node, new: Node) -> None:
        """Exchange a lock on ``old`` for one on ``new``, which lies below it."""
        self._touch(new)
        self._lock_path(new, old)

    def _lock_path(self, node: Node | None, end: Node | None) -> None:
        while node is not end:
            assert node is not None
            if node.lock_count == 0:
                self.num_locked_pages += len(node.pages)
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Give up one lock: a request that used this prefix has ended, or found a longer one."""
        self._touch(node)
        above: Node | None = node
        while above is not None:
            assert above.lock_count > 0, "a node was unlocked more often than locked"
            above.lock_count -= 1
            if above.lock_count == 0:
                self.num_locked_pages -= len(above.pages)
            above = above.parent
        self._offer_for_eviction(node)

    def _touch(self, node: Node) -> None:
        node.stamp = self._new_stamp()

    def _new_stamp(self) -> int:
        """Nanoseconds on the clock, or the least number above all stamps so far: no two are equal."""
        self._last_stamp = max(self._last_stamp + 1, int(self._clock() * 1e9))
        return self._last_stamp

    # ------------------------------------------------------------ growth

    def insert(self, node: Node, tokens: TokenIds, pages: Pages) -> tuple[Node, int]:
        """Hang ``tokens`` (whole pages) and their pages below ``node``.

        Returns:
            The node at whose end ``tokens`` now end, and how many leading pages the tree had already:
            the tree keeps its own and does not take those of the caller.
        """
        size = self.page_size
        assert len(tokens) == len(pages) * size
        found = self._match_below(node, tokens)
        end = found.node
        if found.pages_in_edge < len(end.pages):
            end = self._split(end, found.pages_in_edge)
        if found.num_pages < len(pages):
            rest = tokens[found.num_pages * size :]
            leaf = Node(end, rest.copy(), pages[found.num_pages :].copy())
            end.children[rest[:size].tobytes()] = leaf
            self.num_pages += len(leaf.pages)
            self.num_nodes += 1
            self.generation += 1
            end = leaf
            leaf.stamp = leaf.created = self._new_stamp()
            self._offer_for_eviction(leaf)
        return end, found.num_pages

    def holds_first_page(self, node: Node, tokens: TokenIds) -> bool:
        """Whether the first page of ``tokens`` hangs below ``node`` already."""
        return tokens[: self.page_size].tobytes() in node.children

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut the edge above ``node`` after ``num_pages`` pages; returns the new node at the cut.

        ``node`` itself stays the lower part, so locks on it stay where they are.
        """
        size, parent = self.page_size, node.parent
        assert parent is not None and 0 < num_pages < len(node.pages)
        # copies: a view would keep the whole edge's memory for the sake of a page
        upper = Node(parent, node.tokens[: num_pages * size].copy(), node.pages[:num_pages].copy())
        upper.lock_count = node.lock_count
        upper.inherit(node)
        parent.children[upper.tokens[:size].tobytes()] = upper
        node.parent = upper
        node.tokens = node.tokens[num_pages * size :].copy()
        node.pages = node.pages[num_pages:].copy()
        upper.children[node.tokens[:size].tobytes()] = node
        self.num_nodes += 1
        return upper

    # ------------------------------------------------------------ eviction

    def retain(self, node: Node, level: int, expires: float | None = None) -> None:
        """Note how much a client wants the edge above ``node`` kept, and on the tree's clock until when."""
        node.retention, node.expires = level, expires
        self._offer_for_eviction(node)

    def _offer_for_eviction(self, node: Node) -> None:
        if node.is_evictable:
            self.policy.offer(node)
        elif node in self._salts and node.lock_count == 0 and not node.children:
            del self._roots[self._salts.pop(node)]

    def evict(self, count: int) -> Pages:
        """Drop up to ``count`` unlocked pages, least recently used leaves first, each from its tail.

        Returns:
            The pages that are free now.
        """
        freed: list[Pages] = []
        missing = count
        while missing > 0 and (leaf := self.policy.pop()) is not None:
            kept = max(0, len(leaf.pages) - missing)
            freed.append(leaf.pages[kept:])
            missing -= len(leaf.pages) - kept
            if kept:
                leaf.tokens, leaf.pages = leaf.tokens[: kept * self.page_size], leaf.pages[:kept]
                self.policy.offer(leaf)
            else:
                self._remove_leaf(leaf)
        if not freed:
            return NO_PAGES
        self.generation += 1
        pages = np.concatenate(freed)
        self.num_pages -= len(pages)
        return pages

    def prune(self, node: Node) -> Pages:
        """Drop ``node`` and the prefix above it, up to where somebody else needs it.

        Returns:
            The pages that are free now.
        """
        freed = [NO_PAGES]
        while node.is_evictable and node.parent is not None:
            leaf, node = node, node.parent
            freed.append(leaf.pages)
            self._remove_leaf(leaf)
        self.generation += 1
        pages = np.concatenate(freed)
        self.num_pages -= len(pages)
        return pages

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[: self.page_size].tobytes()]
        leaf.parent = None
        self.num_nodes -= 1
        if leaf.stamp > parent.stamp:  # whoever used the leaf used its prefix
            parent.stamp, parent.traffic_class = leaf.stamp, leaf.traffic_class
        self._offer_for_eviction(parent)

    # ------------------------------------------------------------ inspection

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def roots(self) -> dict[str, Node]:
        """The root of each namespace in use."""
        return self._roots


def _common_length(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
