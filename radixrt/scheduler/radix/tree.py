"""The radix tree over token ids that holds the KV cache.

An edge carries token ids and the ids of the pages that hold their K and V, in whole pages. The idea
is RadixAttention's (Zheng et al., "SGLang", 2024, section 3). Three things differ: tokens enter the
tree when the step that computes them is *planned*, eviction trims leaves page by page from a
priority queue, and chains of nodes without branches are joined again. Each cache root (tenant, salt,
adapter) has a tree of its own, so different ones never share a page.

Costs in pages: lookup O(prefix found) and one copy of the prompt's ids, lock O(depth of the node),
insertion O(pages inserted), eviction O(pages evicted + log leaves); amortised, because edges are
split and joined.
"""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import ID_BYTES, TokenIds, unpack_ids
from radixrt.scheduler.radix.eviction import EvictionPolicy, least_recently_used
from radixrt.scheduler.radix.ghosts import MAX_GHOSTS, Before, Ghost, GhostList
from radixrt.scheduler.radix.node import (
    Hint,
    Match,
    Node,
    Packed,
    common_length,
    earliest_next_use,
    is_kept_alike,
)
from radixrt.scheduler.radix.page_allocator import NO_PAGES, Pages
from radixrt.scheduler.radix.return_hazards import SHARED
from radixrt.scheduler.radix.shares import Shares

_JOIN_RATIO = 2
"""Chains are joined unless the upper edge is longer than the lower one by more than this factor.
So the depth of a chain is at most the logarithm of its length, and each page is copied about as
often."""


class TreeObserver(Protocol):
    """Hears of every page that enters or leaves the tree, during the change: it must be fast and
    must not change the tree. It may keep the arrays, which never change.

    A page is in the tree at most once, so its id identifies the whole prefix that ends with it.
    """

    def stored(
        self, root: CacheRoot | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        """Pages have entered the tree, in order of position, behind a page, or behind a cache
        root."""

    def removed(self, pages: Pages) -> None:
        """Pages have left the tree, in arbitrary order."""


class RadixTree:
    """Prefixes of token ids and the KV pages that hold them.

    >>> import numpy as np
    >>> tree = RadixTree(page_size=2)
    >>> root = tree.lock_root()
    >>> leaf, _ = tree.insert(root, np.array([1, 2, 3, 4], np.int32), np.array([7, 8], np.int32))
    >>> match = tree.match(np.array([1, 2, 3, 9], np.int32))
    >>> match.num_pages, match.pages.tolist()
    (1, [7])

    Args:
        policy: order of eviction; default: least recently used.
        clock: seconds from any fixed moment, for the stamps on the nodes.
        most_ghosts: evicted pages that are remembered.
    """

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_ghosts: int = MAX_GHOSTS,
    ) -> None:
        self.page_size = page_size
        self.policy: EvictionPolicy = policy or least_recently_used()
        self.observers: tuple[TreeObserver, ...] = ()
        """Called for every page that enters or leaves the tree."""
        self.ghosts = GhostList(most_ghosts)  # the pages that were evicted last
        self.shares = Shares()
        self._page_bytes = page_size * ID_BYTES
        self._roots: dict[CacheRoot, Node] = {}
        self._names: dict[Node, CacheRoot] = {}  # of each root
        self.clock = clock
        self._last_stamp = 0
        self.num_pages = 0
        """Pages in the tree."""
        self.num_locked_pages = 0
        """Pages on a path from a root to a locked node."""
        self.num_pinned_pages = 0
        """Pages on a path from a root to a pinned node."""
        self.num_nodes = 0
        self.generation = 0
        """Grows whenever a lookup may give another answer than before."""

    def __del__(self) -> None:
        for node in [*self.nodes(), *self._roots.values()]:
            node.detach()

    @property
    def num_evictable_pages(self) -> int:
        return self.num_pages - self.num_locked_pages

    # ------------------------------------------------------------ lookup

    def match(self, tokens: TokenIds, name: CacheRoot = BASE_ROOT) -> Match | None:
        """Find the longest cached prefix of ``tokens``, in whole pages. Changes nothing."""
        root = self._roots.get(name)
        if root is None:
            return None
        if not self.holds_first_page(root, tokens):
            return Match(root, 0, 0)  # saves the copy below
        return self._match_below(root, tokens.tobytes())

    def _match_below(self, node: Node, packed: bytes) -> Match:
        page_bytes, start = self._page_bytes, 0
        while (child := node.children.get(packed[start : start + page_bytes])) is not None:
            node = child
            if not packed.startswith(node.edge, start):
                pages_in_edge = common_length(node.edge, packed, start) // page_bytes
                return Match(node, start // page_bytes + pages_in_edge, pages_in_edge)
            start += len(node.edge)
        return Match(node, start // page_bytes, node.num_pages)

    # ------------------------------------------------------------ locks

    def lock_match(self, match: Match) -> Node:
        """Lock a matched prefix; returns the node at whose end it ends."""
        node = match.node
        if match.pages_in_edge < node.num_pages:
            node = self.split(node, match.pages_in_edge)
        self.lock(node)
        return node

    def lock_root(self, name: CacheRoot = BASE_ROOT) -> Node:
        """Lock the empty prefix of a cache root."""
        root = self._root(name)
        self.lock(root)
        return root

    def _root(self, name: CacheRoot) -> Node:
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, b"", b"", namespace=name.tenant)
            self._names[root] = name
        return root

    def lock(self, node: Node) -> None:
        """Keep a prefix from eviction until :meth:`unlock`."""
        node.stamp = self._new_stamp()
        self._lock_path(node)

    def move_lock(self, old: Node, new: Node) -> None:
        """Replace a lock on ``old`` by one on ``new``, which lies below it."""
        new.stamp = self._new_stamp()
        self._lock_path(new, old)
        self._join_upwards(new)

    def hold_match(self, match: Match | None, root: CacheRoot) -> Node:
        """Keep a matched prefix, or the empty one of a cache root, from eviction until
        :meth:`let_go`, without a use of it; returns the node at whose end it ends."""
        node = self._root(root) if match is None else match.node
        if match is not None and match.pages_in_edge < node.num_pages:
            node = self.split(node, match.pages_in_edge)
        self.hold(node)
        return node

    def hold(self, node: Node) -> None:
        """As :meth:`hold_match`, for the prefix at whose end a node is."""
        for above in node.path():
            if above.lock_count == 0:
                self.num_locked_pages += above.num_pages
            above.lock_count += 1

    def let_go(self, node: Node) -> None:
        """End one :meth:`hold`. The prefix keeps the time of its last use."""
        self._unlock_path(node)
        self._offer_for_eviction(node)

    def pin(self, node: Node) -> None:
        """Turn a lock on ``node``, which the caller holds, into a lease's; :meth:`unpin` ends
        it."""
        for above in node.path():
            if above.lease_count == 0:
                self.num_pinned_pages += above.num_pages
            above.lease_count += 1

    def unpin(self, node: Node) -> None:
        """End a lease and its lock. The prefix was not used now, so it keeps the time of its last
        use."""
        for above in node.path():
            assert above.lease_count > 0, "a node was unpinned more often than pinned"
            above.lease_count -= 1
            if above.lease_count == 0:
                self.num_pinned_pages -= above.num_pages
        self.let_go(node)

    def _lock_path(self, node: Node, end: Node | None = None) -> None:
        above: Node | None = node  # not node.path(): every request walks here
        while above is not None and above is not end:
            if above.lock_count == 0:
                self.num_locked_pages += above.num_pages
            above.lock_count += 1
            above.uses += 1
            above.last_used = node.stamp
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Remove one lock: a request that used this prefix has ended, or found a longer one."""
        node.stamp = self._new_stamp()
        self._unlock_path(node)
        self._join_upwards(node)
        self._offer_for_eviction(node)

    def _unlock_path(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            assert above.lock_count > 0, "a node was unlocked more often than locked"
            above.lock_count -= 1
            if above.lock_count == 0:
                self.num_locked_pages -= above.num_pages
            if above.last_used < node.stamp:
                above.last_used = node.stamp
            above = above.parent

    def _new_stamp(self) -> int:
        """Nanoseconds on the clock, or the last stamp plus 1: no two stamps are equal."""
        self._last_stamp = max(self._last_stamp + 1, int(self.clock() * 1e9))
        return self._last_stamp

    # ------------------------------------------------------------ growth

    def insert(self, node: Node, tokens: TokenIds, pages: Pages) -> tuple[Node, int]:
        """Insert ``tokens`` and their pages below ``node``, which the caller has locked.

        The caller moves its lock to the returned node (:meth:`move_lock`). New pages can be evicted
        once that lock is removed.

        Args:
            tokens: whole pages: [len(pages) * page_size], int32.
            pages: page ids: [num_pages], int32.

        Returns:
            The node at whose end ``tokens`` now end, and the number of leading pages that the tree
            had already. Of those the tree keeps its own, and the caller keeps its own too.
        """
        packed, page_ids = tokens.tobytes(), pages.tobytes()
        assert len(packed) == len(pages) * self._page_bytes, "tokens and pages disagree"
        found = self._match_below(node, packed)
        end = found.node
        if found.pages_in_edge < end.num_pages:
            end = self.split(end, found.pages_in_edge)
        if found.num_pages < len(pages):
            edge = packed[found.num_pages * self._page_bytes :]
            end = self._grow_leaf(end, edge, page_ids[found.num_pages * ID_BYTES :])
        return end, found.num_pages

    def _grow_leaf(self, parent: Node, edge: bytes, page_ids: bytes) -> Node:
        leaf = Node(parent, edge, page_ids, namespace=parent.namespace)
        if parent.children:
            parent.visit = SHARED
        parent.add_child(leaf)
        parent.count_below(leaf.num_pages, 1)
        self.num_pages += leaf.num_pages
        self.shares.count(leaf.namespace, leaf.num_pages)
        self.num_nodes += 1
        self.generation += 1
        leaf.stamp = leaf.created = leaf.last_used = self._new_stamp()
        if self.observers:
            before = int(parent.pages[-1]) if parent.page_ids else None
            for observer in self.observers:
                observer.stored(self._names.get(parent), before, leaf.tokens, leaf.pages)
        return leaf

    def holds_first_page(self, node: Node, tokens: TokenIds) -> bool:
        """Whether the first page of ``tokens`` hangs below ``node`` already."""
        return tokens[: self.page_size].tobytes() in node.children

    # ------------------------------------------------------------ splitting and joining edges

    def split(self, node: Node, num_pages: int) -> Node:
        """Split the edge above ``node`` after ``num_pages`` pages; returns the new upper node.

        ``node`` itself stays the lower part, so locks on it stay valid.
        """
        parent = node.parent
        assert parent is not None and 0 < num_pages < node.num_pages
        upper = Node(parent, *node.cut(0, num_pages))
        upper.lock_count, upper.lease_count = node.lock_count, node.lease_count
        upper.inherit(node)
        parent.add_child(upper)
        node.edge, node.page_ids = node.cut(num_pages, node.num_pages)
        upper.add_child(node)
        upper.pages_below = node.num_pages + node.pages_below
        upper.nodes_below = node.nodes_below
        upper.count_below(0, 1)
        self.num_nodes += 1
        return upper

    def _join_upwards(self, node: Node) -> None:
        """Join ``node``, just used, with the chain of nodes above it.

        Chunked prefills make such chains, and so does every turn of a chat. An upper node is joined
        only if it has no other child, no lock ends at it (the counts are equal) and its retention
        is the same. ``node`` was used last, so policies that order by use evict the same pages as
        before. The upper node's next use is dropped: it has just been used.
        """
        chain, length, upper = [node], len(node.edge), node.parent
        while (
            upper is not None
            and upper.parent is not None
            and len(upper.children) == 1
            and upper.lock_count == node.lock_count
            and is_kept_alike(upper.hint, node.hint)
            and len(upper.edge) <= _JOIN_RATIO * length
        ):
            chain.append(upper)
            length += len(upper.edge)
            upper = upper.parent
        if len(chain) == 1:
            return
        assert upper is not None
        chain.reverse()
        node.edge = b"".join([link.edge for link in chain])
        node.page_ids = b"".join([link.page_ids for link in chain])
        for link in chain[:-1]:
            link.detach()
        upper.add_child(node)
        upper.count_below(0, 1 - len(chain))
        self.num_nodes -= len(chain) - 1

    # ------------------------------------------------------------ eviction

    def give_hint(self, node: Node, hint: Hint | None) -> None:
        """Replace the hint of an unlocked node.

        A leaf counts as used now, so that policies recognise their older entries for it as stale.
        """
        node.hint = hint
        if node.is_evictable:
            node.stamp = self._new_stamp()
            self._offer(node)

    def limit_share(self, namespace: str, max_pages: int | None) -> None:
        """Set the share of a namespace; None: no bound."""
        if self.shares.limit(namespace, max_pages):
            for node in self.nodes(namespace):
                if node.is_evictable:
                    self.shares.offer(node)

    def _offer(self, leaf: Node) -> None:
        self.policy.offer(leaf)
        self.shares.offer(leaf)

    def _offer_for_eviction(self, node: Node) -> None:
        if node.is_evictable:
            self._offer(node)
        elif node in self._names and node.lock_count == 0 and not node.children:
            del self._roots[self._names.pop(node)]

    def evict(
        self, count: int, rule: Callable[[Node, bool], str] = lambda leaf, is_above_share: ""
    ) -> Pages:
        """Drop up to ``count`` unlocked pages, from the tails of the leaves: first those above a
        share, then in the policy's order.

        Args:
            rule: names the rule that evicts a leaf, given whether its namespace is above its share.

        Returns:
            Page ids that are free now.
        """
        freed: list[Packed] = []
        missing = count
        for leaf, most in self.shares.take(count):
            self.policy.taken(leaf)
            missing -= self._trim(leaf, most, freed, rule(leaf, True))
        while missing > 0 and (first := self.policy.pop()) is not None:
            missing -= self._trim(first, missing, freed, rule(first, False))
        return self._account_removed(freed)

    def _trim(self, leaf: Node, most: int, freed: list[Packed], rule: str) -> int:
        """Drop up to ``most`` pages from the tail of a leaf; returns their number."""
        count = min(leaf.num_pages, most)
        kept = leaf.num_pages - count
        freed.append(leaf.page_ids[kept * ID_BYTES :])
        page = bytes(leaf.cut(kept, kept + 1)[0])
        self.ghosts.add(self._before(leaf, kept), page, Ghost(self.clock(), rule, leaf.visit))
        self.shares.count(leaf.namespace, -count)
        if kept:
            assert leaf.parent is not None
            leaf.parent.count_below(-count, 0)
            leaf.end = None if leaf.end is None else leaf.end._replace(tail=b"")
            leaf.edge, leaf.page_ids = leaf.cut(0, kept)
            self._offer(leaf)
        else:
            self._remove_leaf(leaf)
        return count

    def _before(self, node: Node, num_pages: int) -> Before:
        """The name in the ghost list of what is before a page of an edge."""
        if num_pages:
            return int(node.pages[num_pages - 1])
        assert node.parent is not None
        name = self._names.get(node.parent)
        return int(node.parent.pages[-1]) if name is None else name

    def prune(self, node: Node) -> Pages:
        """Drop ``node`` and the prefix above it, up to the first node that is in use.

        Returns:
            Page ids that are free now.
        """
        freed: list[Packed] = []
        while node.is_evictable and node.parent is not None:
            leaf, node = node, node.parent
            freed.append(leaf.page_ids)
            self.shares.count(leaf.namespace, -leaf.num_pages)
            self._remove_leaf(leaf)
        return self._account_removed(freed)

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        parent.remove_child(leaf)
        parent.count_below(-leaf.num_pages, -1)
        leaf.detach()
        self.num_nodes -= 1
        if leaf.stamp > parent.stamp:  # a request that used the leaf used its prefix
            parent.stamp = leaf.stamp
            parent.note_visit(leaf.visit)
        if leaf.hint is not None or parent.hint is not None:
            # a request that continues from the leaf needs its parent at the same time
            next_use = earliest_next_use(parent.hint, leaf.hint, self.clock())
            hint = (parent.hint or Hint()).with_next_use(next_use)
            parent.hint = hint if hint.says_something else None
        self._offer_for_eviction(parent)

    def _account_removed(self, freed: list[Packed]) -> Pages:
        if not freed:
            return NO_PAGES
        pages = unpack_ids(b"".join(freed))
        self.num_pages -= len(pages)
        self.generation += 1
        self.ghosts.forget_below(pages.tolist())
        for observer in self.observers:
            observer.removed(pages)
        return pages

    # ------------------------------------------------------------ inspection

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """All nodes but the roots, or those of a namespace, parents first."""
        roots = [r for r in self._roots.values() if namespace in (None, r.namespace)]
        pending = [child for root in roots for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def root_of(self, root: Node) -> CacheRoot:
        """What a root node stands for."""
        return self._names[root]

    def roots(self) -> dict[CacheRoot, Node]:
        """The node of each root in use."""
        return self._roots
