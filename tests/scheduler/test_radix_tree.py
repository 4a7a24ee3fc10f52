"""The radix tree against a dictionary from whole prefixes to pages."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from radixrt.scheduler.node import Node
from radixrt.scheduler.radix_tree import RadixTree

Prefix = tuple[str, tuple[int, ...]]


class DictionaryCache:
    """What a prefix cache is: a page for each prefix whose length is a multiple of the page size.

    A prefix was last used when anything that begins with it was last used.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.clock = 0

    def prefixes(self, salt: str, tokens: tuple[int, ...]) -> list[Prefix]:
        size = self.page_size
        return [(salt, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def match(self, salt: str, tokens: tuple[int, ...]) -> list[int]:
        found = []
        for prefix in self.prefixes(salt, tokens):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return found

    def use(self, salt: str, tokens: tuple[int, ...]) -> None:
        self.clock += 1
        for prefix in self.prefixes(salt, tokens):
            if prefix in self.pages:
                self.used[prefix] = self.clock

    def insert(self, salt: str, tokens: tuple[int, ...], pages: list[int]) -> None:
        for prefix, page in zip(self.prefixes(salt, tokens), pages, strict=True):
            self.pages.setdefault(prefix, page)
        self.use(salt, tokens)

    def evict(self, count: int) -> list[int]:
        """The last page of the branch that was used longest ago, again and again."""
        freed = []
        for _ in range(min(count, len(self.pages))):
            parents = {(salt, tokens[: -self.page_size]) for salt, tokens in self.pages}
            oldest = min((p for p in self.pages if p not in parents), key=self.used.__getitem__)
            freed.append(self.pages.pop(oldest))
        return freed


def insert(tree: RadixTree, salt: str, tokens: np.ndarray, pages: np.ndarray) -> int:
    """As a sequence does it: lock, insert below, unlock."""
    root = tree.lock_root(salt)
    node, existing = tree.insert(root, tokens, pages)
    tree.move_lock(root, node)
    tree.unlock(node)
    return existing


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "use", "evict"]),
        st.sampled_from(["", "tenant"]),
        st.lists(st.integers(0, 2), max_size=14),
        st.integers(0, 6),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations=operations, page_size=st.integers(1, 3))
def test_tree_is_a_dictionary_of_prefixes_with_lru_leaves(operations: list, page_size: int) -> None:
    tree, model, next_page = RadixTree(page_size), DictionaryCache(page_size), 0
    for action, salt, ids, count in operations:
        whole = ids[: len(ids) // page_size * page_size]
        tokens = np.array(whole, dtype=np.int32)
        match = tree.match(tokens, salt)
        expected = model.match(salt, tuple(whole))
        assert ([] if match is None else tree.pages_of(match).tolist()) == expected
        if action == "insert" and whole:
            pages = np.arange(next_page, next_page + len(whole) // page_size, dtype=np.int32)
            next_page += len(pages)
            assert insert(tree, salt, tokens, pages) == len(expected)
            model.insert(salt, tuple(whole), pages.tolist())
        elif action == "use" and match is not None:
            tree.unlock(tree.lock_match(match))
            model.use(salt, tuple(whole[: len(expected) * page_size]))
        elif action == "evict":
            assert sorted(tree.evict(count).tolist()) == sorted(model.evict(count))
        assert tree.num_pages == tree.num_evictable_pages == len(model.pages)
    assert sorted(tree.evict(10**6).tolist()) == sorted(model.pages.values())
    assert tree.num_nodes == 0 and not tree.roots()


def test_locked_prefixes_are_never_evicted() -> None:
    tree = RadixTree(page_size=2)
    insert(
        tree,
        "",
        np.array([1, 2, 3, 4, 5, 6], dtype=np.int32),
        np.array([10, 11, 12], dtype=np.int32),
    )
    match = tree.match(np.array([1, 2, 3, 4, 9, 9], dtype=np.int32))
    assert match is not None and match.num_pages == 2
    node = tree.lock_match(match)
    assert tree.num_evictable_pages == 1
    assert tree.evict(3).tolist() == [12]
    tree.unlock(node)
    assert sorted(tree.evict(3).tolist()) == [10, 11]


def test_a_lock_stays_at_its_prefix_when_the_edge_is_split() -> None:
    tree = RadixTree(page_size=1)
    root = tree.lock_root()
    deep, _ = tree.insert(root, np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32))
    tree.move_lock(root, deep)
    insert(tree, "", np.array([0, 1, 2, 9], dtype=np.int32), np.array([0, 1, 2, 9], dtype=np.int32))
    assert tree.num_locked_pages == 8 and path(deep) == list(range(8))
    assert tree.evict(100).tolist() == [9]
    tree.unlock(deep)
    assert tree.num_locked_pages == 0


def path(node: Node | None) -> list[int]:
    pages: list[int] = []
    while node is not None:
        pages = node.pages.tolist() + pages
        node = node.parent
    return pages


def test_eviction_stays_cheap_when_a_hot_leaf_is_used_again_and_again() -> None:
    """The queue of leaves forgets stale entries instead of growing with every use."""
    tree = RadixTree(page_size=1)
    tokens = np.arange(4, dtype=np.int32)
    insert(tree, "", tokens, tokens)
    for _ in range(20_000):
        match = tree.match(tokens)
        assert match is not None
        tree.unlock(tree.lock_match(match))
    assert len(tree.policy._leaves) <= 1024
