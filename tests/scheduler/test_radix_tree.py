"""What the radix tree promises, a promise a test."""

import sys

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from radixrt.messages.cache_root import CacheRoot
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.dictionary_cache import DictionaryCache
from tests.suite import examples


def insert(tree: RadixTree, salt: str, tokens: np.ndarray, pages: np.ndarray) -> int:
    """As a sequence does it: lock, insert below, unlock."""
    root = tree.lock_root(CacheRoot(salt=salt))
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


@settings(max_examples=examples(300), deadline=None)
@given(operations=operations, page_size=st.integers(1, 3))
def test_tree_is_a_dictionary_of_prefixes_with_lru_leaves(operations: list, page_size: int) -> None:
    tree, model, next_page = RadixTree(page_size), DictionaryCache(page_size), 0
    for action, salt, ids, count in operations:
        whole = ids[: len(ids) // page_size * page_size]
        tokens = np.array(whole, dtype=np.int32)
        match = tree.match(tokens, CacheRoot(salt=salt))
        expected = model.match(CacheRoot(salt=salt), tuple(whole))
        assert ([] if match is None else match.pages.tolist()) == expected
        if action == "insert" and whole:
            pages = np.arange(next_page, next_page + len(whole) // page_size, dtype=np.int32)
            next_page += len(pages)
            assert insert(tree, salt, tokens, pages) == len(expected)
            model.insert(CacheRoot(salt=salt), tuple(whole), pages.tolist())
        elif action == "use" and match is not None:
            tree.unlock(tree.lock_match(match))
            model.use(CacheRoot(salt=salt), tuple(whole[: len(expected) * page_size]))
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


def test_a_prompt_prefilled_by_chunks_becomes_a_few_nodes() -> None:
    tree, size = RadixTree(page_size=1), 1000
    tokens = np.arange(size, dtype=np.int32)
    node = tree.lock_root()
    for start in range(0, size, 10):
        end, _ = tree.insert(node, tokens[start : start + 10], tokens[start : start + 10])
        tree.move_lock(node, end)
        node = end
        assert path(node) == list(range(start + 10)) and tree.num_locked_pages == start + 10
    assert tree.num_nodes <= 7, "no more than the logarithm of a hundred chunks"
    tree.unlock(node)
    assert tree.evict(400).tolist() != [] and tree.num_pages == 600
    match = tree.match(tokens)
    assert match is not None and match.pages.tolist() == list(range(600))


def test_a_chain_is_not_joined_across_a_lock_or_a_branch() -> None:
    tree = RadixTree(page_size=1)
    root = tree.lock_root()
    tokens = np.arange(8, dtype=np.int32)
    upper, _ = tree.insert(root, tokens[:4], tokens[:4])
    tree.move_lock(root, upper)
    tree.lock(upper)
    lower, _ = tree.insert(upper, tokens[4:], tokens[4:])
    tree.move_lock(upper, lower)
    assert path(upper) == [0, 1, 2, 3], "another sequence still ends here"
    insert(tree, "", np.array([0, 1, 9], dtype=np.int32), np.array([0, 1, 9], dtype=np.int32))
    tree.unlock(upper)
    tree.unlock(lower)
    assert path(lower) == list(range(8)) and tree.num_pages == 9
    tree.unlock(tree.lock(lower) or lower)
    match = tree.match(np.array([0, 1, 9], dtype=np.int32))
    assert match is not None and match.pages.tolist() == [0, 1, 9]


def test_a_long_leaf_is_evicted_page_by_page_from_its_tail() -> None:
    """Long edges are cut by view: what is left must be right, and must not keep the whole edge in
    memory."""
    tree, size = RadixTree(page_size=16), 4000
    tokens, pages = np.arange(size * 16, dtype=np.int32), np.arange(size, dtype=np.int32)
    insert(tree, "", tokens, pages)
    for last in range(size - 1, -1, -1):
        assert tree.evict(1).tolist() == [last]
        for node in tree.nodes():
            assert isinstance(node.edge, bytes) or len(node.edge.obj) <= 2 * len(node.edge)
        match = tree.match(tokens)
        assert (0 if match is None else match.num_pages) == last
    assert tree.num_nodes == 0


def test_a_tree_that_is_given_up_leaves_no_nodes_behind() -> None:
    """The garbage collector does not see them."""
    tree = RadixTree(page_size=1)
    for first in range(3):
        tokens = np.array([first, 1, 2, 3], dtype=np.int32)
        insert(tree, "", tokens, tokens)
    node = next(tree.nodes())
    references = sys.getrefcount(node)
    del tree
    assert sys.getrefcount(node) == 2 < references and node.parent is None
