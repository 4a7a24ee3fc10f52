"""Every eviction policy against a dictionary of pages that is searched from end to end."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.scheduler.eviction.duel import Duel, ReturnHazardQueue
from radixrt.scheduler.eviction.fifo import FIFO
from radixrt.scheduler.eviction.lru import LeafLRU
from radixrt.scheduler.eviction.policy import EvictionPolicy
from radixrt.scheduler.eviction.priority import Priority
from radixrt.scheduler.node import RETAIN_DEFAULT, Node
from radixrt.scheduler.radix_tree import RadixTree

Tokens = tuple[int, ...]


class Pool:
    """A page for each prefix, and what is known of it. Page size 1, so every prefix is a page."""

    def __init__(self) -> None:
        self.page: dict[Tokens, int] = {}
        self.used: dict[Tokens, int] = {}
        self.created: dict[Tokens, int] = {}
        self.hint: dict[Tokens, tuple[int, float | None]] = {}
        self.clock = 0

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(1, len(tokens) + 1)]

    def insert(self, tokens: Tokens, pages: list[int]) -> None:
        self.clock += 1
        for prefix, page in zip(self.prefixes(tokens), pages, strict=True):
            if prefix not in self.page:
                self.page[prefix], self.created[prefix] = page, self.clock
                self.hint[prefix] = (RETAIN_DEFAULT, None)
        self.use(tokens)

    def use(self, tokens: Tokens) -> None:
        self.clock += 1
        for prefix in self.prefixes(tokens):
            if prefix in self.page:
                self.used[prefix] = self.clock

    def retain(self, tokens: Tokens, level: int, expires: float | None) -> None:
        for prefix in self.prefixes(tokens):
            if prefix in self.page:
                self.hint[prefix] = (level, expires)

    def level(self, prefix: Tokens, now: float) -> int:
        level, expires = self.hint[prefix]
        return RETAIN_DEFAULT if expires is not None and expires <= now else level

    def evict(self, count: int, order: Callable[[Tokens], tuple]) -> list[int]:
        """The last page of the branch that is first in order, again and again."""
        freed = []
        for _ in range(min(count, len(self.page))):
            inner = {prefix[:-1] for prefix in self.page}
            first = min((p for p in self.page if p not in inner), key=order)
            freed.append(self.page.pop(first))
        return freed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(name: str, clock: Clock) -> EvictionPolicy:
    policies = {"lru": LeafLRU, "fifo": FIFO}
    if name == "duel":
        return Duel(16, 1, clock)
    return Priority(clock) if name == "priority" else policies[name]()


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "use", "evict", "retain", "wait"]),
        st.lists(st.integers(0, 2), max_size=9).map(tuple),
        st.integers(0, 6),
    ),
    max_size=50,
)


@pytest.mark.parametrize("name", ["lru", "fifo", "priority", "duel"])
@settings(max_examples=250, deadline=None)
@given(operations=operations)
def test_policy_evicts_what_a_search_of_all_pages_would(name: str, operations: list) -> None:
    clock = Clock()
    tree, pool, next_page = RadixTree(1, make(name, clock), clock), Pool(), 0

    def order(prefix: Tokens) -> tuple:
        if name == "fifo":
            return (pool.created[prefix],)
        level = pool.level(prefix, clock.now) if name == "priority" else 0
        return (level, pool.used[prefix])

    for action, tokens, number in operations:
        array = np.array(tokens, dtype=np.int32)
        match action:
            case "insert":
                pages = list(range(next_page, next_page + len(tokens)))
                next_page += len(tokens)
                root = tree.lock_root()
                node, _ = tree.insert(root, array, np.array(pages, dtype=np.int32))
                tree.move_lock(root, node)
                tree.unlock(node)
                pool.insert(tokens, pages)
            case "use" | "retain":
                found = tree.match(array)
                if found is not None:
                    node = tree.lock_match(found)
                    tree.unlock(node)
                    reached = tokens[: found.num_pages]
                    pool.use(reached)
                    if action == "retain":
                        expires = None if number == 0 else clock.now + number
                        retain_path(tree, node, number % 3, expires)
                        pool.retain(reached, number % 3, expires)
            case "evict":
                freed = tree.evict(number).tolist()
                assert sorted(freed) == sorted(pool.evict(number, order))
            case "wait":
                clock.now += number
        assert cached(tree) == sorted(pool.page.values())


def retain_path(tree: RadixTree, node: Node | None, level: int, expires: float | None) -> None:
    while node is not None and node.parent is not None:
        tree.retain(node, level, expires)
        node = node.parent


def cached(tree: RadixTree) -> list[int]:
    return sorted(page for node in tree.nodes() for page in node.pages.tolist())


class HumpedHazards:
    """Indices that rise with age to the peak of their class and fall from there."""

    def __init__(self, peaks: list[float]) -> None:
        self.peaks = peaks

    def index(self, kind: int, age_s: float) -> float:
        return 100 * (kind + 1) - abs(age_s - self.peaks[kind])


@settings(max_examples=200, deadline=None)
@given(
    leaves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90)),
        min_size=1,
        max_size=20,
        unique_by=lambda leaf: leaf[1],
    ),
    peaks=st.lists(st.integers(0, 100), min_size=4, max_size=4),
)
def test_the_least_likely_leaf_is_found_at_the_ends_of_the_classes(
    leaves: list[tuple[int, int]], peaks: list[float]
) -> None:
    hazards, queue = HumpedHazards(peaks), ReturnHazardQueue()
    root = Node(None, np.empty(0, np.int32), np.empty(0, np.int32))
    for kind, second in leaves:
        leaf = Node(root, np.zeros(1, np.int32), np.zeros(1, np.int32))
        leaf.traffic_class, leaf.stamp = kind, second * 10**9
        queue.push(leaf)
    found = queue.least_likely(hazards, now=100.0)  # type: ignore[arg-type]
    assert found is not None
    least = min(hazards.index(kind, 100.0 - second) for kind, second in leaves)
    assert hazards.index(found.traffic_class, 100.0 - found.stamp / 1e9) == pytest.approx(least)


def test_a_hint_holds_until_it_expires() -> None:
    clock = Clock()
    tree = RadixTree(1, Priority(clock), clock)
    ends = []
    for first in (10, 20, 30):
        tokens = np.arange(first, first + 3, dtype=np.int32)
        root = tree.lock_root()
        node, _ = tree.insert(root, tokens, tokens)
        tree.move_lock(root, node)
        tree.unlock(node)
        ends.append(node)
    tree.retain(ends[0], 2, expires=5.0)
    tree.retain(ends[2], 0)
    assert tree.evict(2).tolist() == [31, 32]
    clock.now = 5.0
    assert tree.evict(4).tolist() == [30, *range(10, 13)]
