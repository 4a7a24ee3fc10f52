"""Every eviction policy, with and without hints, against a dictionary of pages that is searched
from end to end."""

import os
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.requests import NO_HINTS, CacheHints, Retention
from radixrt.scheduler.radix.eviction import make_policy
from radixrt.scheduler.radix.node import DEFAULT, HIGH, LEVELS, NONE
from radixrt.scheduler.radix.request_hints import apply_hints
from radixrt.scheduler.radix.tree import RadixTree

EXAMPLES = int(os.environ.get("RADIXRT_EVICTION_EXAMPLES", "80"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Tokens = tuple[int, ...]
FOREVER = float("inf")


class Pool:
    """A page for each prefix, and what is known of it. Page size 1, so every prefix is a page."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.page: dict[Tokens, int] = {}
        self.used: dict[Tokens, tuple[float, int]] = {}
        self.created: dict[Tokens, int] = {}
        self.level: dict[Tokens, tuple[int, float]] = {}
        self.next_use: dict[Tokens, float] = {}
        self.priority: dict[Tokens, int] = {}
        self.uses = 0

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(1, len(tokens) + 1)]

    def insert(self, tokens: Tokens, pages: list[int]) -> None:
        for prefix, page in zip(self.prefixes(tokens), pages, strict=True):
            if prefix not in self.page:
                self.page[prefix], self.created[prefix] = page, self.uses
                self.level[prefix] = (DEFAULT, FOREVER)

    def use(self, tokens: Tokens, hints: CacheHints, priority: int) -> None:
        """A request ends that has used this prefix."""
        self.uses += 1
        for prefix in self.prefixes(tokens):
            self.used[prefix] = (self.clock.now, self.uses)
            level, expires = self.word(len(prefix), hints)
            below = [p for p in self.page if p[: len(prefix)] == prefix]
            if level == NONE and any(p != tokens[: len(p)] for p in below):
                continue  # others go on from here
            self.next_use.pop(prefix, None)
            self.priority[prefix] = priority
            old, old_expires = self.level_now(prefix)
            if old == HIGH and level == HIGH:
                expires = max(expires, old_expires)
            elif old == HIGH:
                level, expires = old, old_expires
            self.level[prefix] = (level, expires)
        if hints.next_use_s is not None and tokens:
            self.next_use[tokens] = self.clock.now + hints.next_use_s

    def word(self, num_tokens: int, hints: CacheHints) -> tuple[int, float]:
        words = [
            (LEVELS[r.level], FOREVER if r.ttl_s is None else self.clock.now + r.ttl_s)
            for r in hints.retain
            if r.num_tokens is None or r.num_tokens >= num_tokens
        ]
        return max(words, default=(DEFAULT, FOREVER))

    def level_now(self, prefix: Tokens) -> tuple[int, float]:
        level, expires = self.level[prefix]
        return (level, expires) if expires > self.clock.now else (DEFAULT, FOREVER)

    def evict(self, count: int, order: Callable[[Tokens], tuple]) -> list[int]:
        """The last page of the branch that is first in order, again and again."""
        freed = []
        for _ in range(min(count, len(self.page))):
            inner = {prefix[:-1] for prefix in self.page}
            first = self.first_of([p for p in self.page if p not in inner], order)
            freed.append(self.page.pop(first))
            self.inherit(first[:-1], first)
        return freed

    def first_of(self, leaves: list[Tokens], order: Callable[[Tokens], tuple]) -> Tokens:
        now = self.clock.now
        for leaf in leaves:
            if leaf in self.next_use and self.next_use[leaf] <= now:
                due = self.next_use.pop(leaf)
                self.used[leaf] = max(self.used[leaf], (due, 0))
        level = min(self.level_now(leaf)[0] for leaf in leaves)
        leaves = [leaf for leaf in leaves if self.level_now(leaf)[0] == level]
        by_use = self.used.__getitem__
        latest = max(self.next_use.keys() & set(leaves), key=self.next_use.get, default=None)
        others = [leaf for leaf in leaves if leaf not in self.next_use]
        first = min(others, key=order if level == DEFAULT else by_use, default=None)
        if latest is None or first is None:
            return latest or first  # type: ignore[return-value]
        return latest if self.next_use[latest] - now > now - self.used[first][0] else first

    def inherit(self, parent: Tokens, leaf: Tokens) -> None:
        next_uses = [self.next_use.pop(leaf, 0), self.next_use.pop(parent, 0)]
        to_come = [use for use in next_uses if use > self.clock.now]
        if parent in self.page:
            self.used[parent] = max(self.used[parent], self.used[leaf])
            if to_come:
                self.next_use[parent] = min(to_come)


class Life:
    """A tree and a pool of which the same requests are told."""

    def __init__(self, name: EvictionPolicyName) -> None:
        self.name, self.clock = name, Clock()
        self.tree = RadixTree(1, make_policy(name, self.clock), self.clock)
        self.pool, self.next_page = Pool(self.clock), 0

    def request(self, tokens: Tokens, hints: CacheHints, priority: int, *, grows: bool) -> None:
        array = np.array(tokens, dtype=np.int32)
        found = self.tree.match(array)
        if found is None and not grows:
            return
        node = self.tree.lock_root() if found is None else self.tree.lock_match(found)
        known = 0 if found is None else found.num_pages
        if grows:
            pages = list(range(self.next_page, self.next_page + len(tokens)))
            self.next_page += len(tokens)
            new = np.array(pages[known:], dtype=np.int32)
            end, _ = self.tree.insert(node, array[known:], new)
            self.tree.move_lock(node, end)
            self.pool.insert(tokens, pages)
            node, known = end, len(tokens)
        heeded = priority if self.name == "priority" else 0
        apply_hints(self.tree, node, known, hints, self.clock.now, heeded)
        self.tree.unlock(node)
        self.pool.use(tokens[:known], hints, priority)

    def evict(self, count: int) -> None:
        freed = self.tree.evict(count).tolist()
        assert sorted(freed) == sorted(self.pool.evict(count, self.order))

    def order(self, prefix: Tokens) -> tuple:
        pool = self.pool
        if self.name == "fifo":
            return (pool.created[prefix],)
        urgency = -pool.priority[prefix] if self.name == "priority" else 0
        return (urgency, pool.used[prefix])


retentions = st.builds(
    Retention,
    level=st.sampled_from(["none", "default", "high"]),
    num_tokens=st.none() | st.integers(0, 9),
    ttl_s=st.none() | st.integers(1, 6),
)
operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "use", "evict", "wait"]),
        st.lists(st.integers(0, 2), max_size=9).map(tuple),
        st.integers(0, 6),
        st.lists(retentions, max_size=2),
        st.none() | st.integers(0, 9),
    ),
    max_size=50,
)


@pytest.mark.parametrize("name", ["value", "lru", "fifo", "priority"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(operations=operations, with_hints=st.booleans())
def test_policy_evicts_what_a_search_of_all_pages_would(
    name: EvictionPolicyName, operations: list, with_hints: bool
) -> None:
    life = Life(name)
    for turn, (action, tokens, number, retain, next_use) in enumerate(operations):
        # hundredths of a second, so that no two times to the next use are ever equal
        next_use_s = None if next_use is None else next_use + 0.01 * turn + 0.005
        hints = CacheHints(retain=retain, next_use_s=next_use_s) if with_hints else CacheHints()
        match action:
            case "insert" | "use":
                life.request(tokens, hints, number % 3, grows=action == "insert")
            case "evict":
                life.evict(number)
            case "wait":
                life.clock.now += number
        assert cached(life.tree) == sorted(life.pool.page.values())


def cached(tree: RadixTree) -> list[int]:
    return sorted(page for node in tree.nodes() for page in node.pages.tolist())


def test_a_stated_next_use_that_is_past_saves_no_page_above_a_share() -> None:
    clock = Clock()
    tree = RadixTree(1, make_policy("lru", clock), clock)
    tree.limit_share("key:a", 2)

    def use(tenant: str, pages: list[int], hints: CacheHints = NO_HINTS) -> None:
        clock.now += 1
        root = tree.lock_root(CacheRoot(tenant))
        ids = np.array(pages, dtype=np.int32)
        end, _ = tree.insert(root, ids, ids)
        tree.move_lock(root, end)
        apply_hints(tree, end, len(pages), hints, clock.now, 0)
        tree.unlock(end)

    use("key:a", [1, 2], CacheHints(next_use_s=3.0))
    use("", [3, 4])
    clock.now += 10
    assert tree.evict(1).tolist() == [4], "nobody is above a share"
    use("key:a", [5, 6])
    assert sorted(tree.evict(2).tolist()) == [1, 2]
    assert tree.evict(1).tolist() == [3]
