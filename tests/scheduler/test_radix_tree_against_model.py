"""The radix tree against a dictionary, over long random lives of many sequences at once.

``make test-tree`` makes 100,000 operations of each of these lives; the ordinary run is content with
fewer.
"""

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix import node as node_module
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.page_allocator import PageAllocator, Pages
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.dictionary_cache import DictionaryCache

NUM_OPERATIONS = int(os.environ.get("RADIXRT_TREE_OPERATIONS", "1500"))
NUM_PAGES = 60
ROOTS = (BASE_ROOT, BASE_ROOT, CacheRoot(salt="tenant"))
KEYS = (
    CacheRoot("key:a"),
    CacheRoot("key:a", "salt"),
    CacheRoot("key:a", "", "salt"),
    CacheRoot("key:b"),
    CacheRoot("key:c"),
)


@dataclass
class Reader:
    """A sequence that holds a lock."""

    root: CacheRoot
    tokens: tuple[int, ...]
    """The prefix it has locked."""
    node: Node


class Listener:
    """Rebuilds the prefix behind every page from what an observer hears."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.prefixes: dict[int, tuple[str, tuple[int, ...]]] = {}

    def stored(
        self, root: CacheRoot | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        assert (root is None) != (previous_page is None)
        begin = (root or BASE_ROOT, ()) if previous_page is None else self.prefixes[previous_page]
        for index, page in enumerate(pages.tolist()):
            assert page not in self.prefixes, "a page is stored twice"
            known = tokens[: (index + 1) * self.page_size].tolist()
            self.prefixes[page] = (begin[0], (*begin[1], *known))

    def removed(self, pages: Pages) -> None:
        for page in pages.tolist():
            del self.prefixes[page]


class Life:
    """Tree, allocator and dictionary, side by side."""

    def __init__(self, seed: int, page_size: int, roots: tuple[CacheRoot, ...] = ROOTS) -> None:
        self.roots = roots
        self.random = random.Random(seed)
        self.page_size = page_size
        self.tree, self.model = RadixTree(page_size), DictionaryCache(page_size)
        self.listener = Listener(page_size)
        self.tree.observers = (self.listener,)
        self.allocator = PageAllocator(NUM_PAGES)
        self.readers: list[Reader] = []

    def some_tokens(self, max_pages: int) -> tuple[int, ...]:
        """Few different tokens, so that prefixes meet; runs, so that edges get long."""
        pages = self.random.randint(1, max_pages)
        token, tokens = self.random.randrange(2), []
        for _ in range(pages * self.page_size):
            if self.random.random() < 0.2 / self.page_size:
                token = self.random.randrange(3)
            tokens.append(token)
        return tuple(tokens)

    def begin(self) -> None:
        """Look a prompt up and lock what is there."""
        root, tokens = self.random.choice(self.roots), self.some_tokens(15)
        asked = np.array(
            tokens + (1,) * self.random.randrange(self.page_size), dtype=np.int32
        )  # a page that is not full counts for nothing
        match = self.tree.match(asked, root)
        found = [] if match is None else match.pages.tolist()
        expected = self.model.match(root, tuple(asked.tolist()))
        assert found == expected
        node = self.tree.lock_root(root) if match is None else self.tree.lock_match(match)
        prefix = tuple(asked[: len(found) * self.page_size].tolist())
        self.model.locks.append((root, prefix))
        self.model.use(root, prefix)
        self.readers.append(Reader(root, prefix, node))

    def extend(self) -> None:
        """A sequence goes on, on pages of its own, and puts them into the tree."""
        reader = self.random.choice(self.readers)
        more = self.some_tokens(6)
        count = len(more) // self.page_size
        self.evict(count - self.allocator.num_free)
        if self.allocator.num_free < count:
            return
        pages, tokens = self.allocator.allocate(count), reader.tokens + more
        known = self.model.match(reader.root, tokens)
        end, existing = self.tree.insert(reader.node, np.array(more, dtype=np.int32), pages)
        assert existing == len(known) - len(reader.tokens) // self.page_size
        self.allocator.free(pages[:existing])
        self.tree.move_lock(reader.node, end)
        self.model.insert(reader.root, tokens, [*known, *pages[existing:].tolist()])
        self.model.locks.remove((reader.root, reader.tokens))
        self.model.locks.append((reader.root, tokens))
        reader.node, reader.tokens = end, tokens

    def end(self, *, prune: bool = False) -> None:
        reader = self.readers.pop(self.random.randrange(len(self.readers)))
        self.tree.unlock(reader.node)
        self.model.locks.remove((reader.root, reader.tokens))
        self.model.use(reader.root, reader.tokens)
        if prune:
            freed = self.tree.prune(reader.node)
            expected = self.model.prune(reader.root, reader.tokens)
            assert sorted(freed.tolist()) == sorted(expected)
            self.allocator.free(freed)

    def evict(self, count: int) -> None:
        freed = self.tree.evict(count)
        assert sorted(freed.tolist()) == sorted(self.model.evict(count))
        self.allocator.free(freed)

    def limit(self) -> None:
        """A namespace gets a share, or another one, or loses it."""
        namespace = self.random.choice(KEYS).tenant
        most = self.random.choice((None, 0, 1, 5, 10, 20))
        self.tree.limit_share(namespace, most)
        self.model.max_pages.pop(namespace, None)
        if most is not None:
            self.model.max_pages[namespace] = most

    def step(self) -> None:
        """One random operation."""
        action = self.random.random()
        if not self.readers or (action < 0.3 and len(self.readers) < 6):
            self.begin()
        elif action < 0.6:
            self.extend()
        elif action < 0.85:
            self.end()
        elif action < 0.9:
            self.end(prune=True)
        else:
            self.evict(self.random.randint(1, 20))

    def check(self) -> None:
        """The tree holds what the dictionary holds, and has counted right."""
        tree, model = self.tree, self.model
        held = {page: prefix for prefix, page in model.pages.items()}
        assert self.listener.prefixes == held
        assert tree.num_pages == len(held)
        assert tree.num_locked_pages == len(model.locked())
        for namespace, share in tree.shares.all().items():
            assert share.num_pages == sum(root.tenant == namespace for root, _ in model.pages)
        free = self.allocator.free_pages().tolist()
        assert sorted([*free, *held]) == list(range(NUM_PAGES))
        nodes = list(tree.nodes())
        assert tree.num_nodes == len(nodes)
        assert sorted(p for node in nodes for p in node.pages.tolist()) == sorted(held)
        for node in nodes:
            assert len(node.tokens) == node.num_pages * self.page_size > 0
            assert node.parent is not None
            assert node.parent.children[node.tokens[: self.page_size].tobytes()] is node
            below = sum(child.lock_count for child in node.children.values())
            assert node.lock_count == below + sum(r.node is node for r in self.readers)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shortest_view", [1, 4096])
@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), (1, 2), (2, 3), (3, 16)])
def test_tree_is_a_dictionary_of_prefixes_whatever_happens(
    seed: int, page_size: int, shortest_view: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "_SHORTEST_VIEW", shortest_view)
    life = Life(seed, page_size)
    for operation in range(NUM_OPERATIONS):
        life.step()
        if operation % 10 == 0:
            life.check()
    while life.readers:
        life.end()
    life.check()
    life.evict(NUM_PAGES)
    assert life.allocator.num_free == NUM_PAGES
    assert life.tree.num_nodes == 0 and not life.tree.roots() and not life.listener.prefixes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "page_size"), [(4, 1), (5, 16)])
def test_namespaces_above_their_shares_are_evicted_first(seed: int, page_size: int) -> None:
    life = Life(seed, page_size, roots=(BASE_ROOT, *KEYS))
    for operation in range(NUM_OPERATIONS):
        if life.random.random() < 0.03:
            life.limit()
        life.step()
        if operation % 10 == 0:
            life.check()
    while life.readers:
        life.end()
    life.evict(NUM_PAGES)
    assert not any(share.num_pages for share in life.tree.shares.all().values())
