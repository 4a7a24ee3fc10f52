"""What clients say of the future decides what stays, and nothing else."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.requests import CacheHints, Retention
from radixrt.scheduler.radix.eviction import (
    ByKey,
    first_in_first_out,
    least_recently_used,
    least_urgent,
    make_policy,
)
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.request_hints import ENDS_PER_SESSION, Sessions, apply_hints
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.engine_model import EngineModel, limits
from tests.suite import examples

BASE_POLICIES: dict[EvictionPolicyName, Callable[[], ByKey]] = {
    "lru": least_recently_used,
    "fifo": first_in_first_out,
    "priority": least_urgent,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def use(tree: RadixTree, tokens: list[int], pages: list[int]) -> Node:
    """A request that computes what is missing of a prompt and ends; its node is still locked."""
    array, new = np.array(tokens, dtype=np.int32), np.array(pages, dtype=np.int32)
    found = tree.match(array)
    node = tree.lock_root() if found is None else tree.lock_match(found)
    known = 0 if found is None else found.num_pages
    end, _ = tree.insert(node, array[known:], new[known:])
    tree.move_lock(node, end)
    return end


# ------------------------------------------------------------ without hints, and with a known future

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=40)


@pytest.mark.parametrize("name", BASE_POLICIES)
@settings(max_examples=examples(100), deadline=None)
@given(prompts=prompts, pool=st.integers(8, 20))
def test_without_hints_each_policy_evicts_page_for_page_what_it_would_alone(
    name: EvictionPolicyName, prompts: list[list[int]], pool: int
) -> None:
    clock = Clock()
    alone = RadixTree(1, BASE_POLICIES[name](), clock)
    heeding = RadixTree(1, make_policy(name, clock), clock)
    next_page = 0
    for prompt in prompts:
        clock.now += 1.0
        pages = list(range(next_page, next_page + len(prompt)))
        next_page += len(prompt)
        for tree in (alone, heeding):
            end = use(tree, prompt, pages)
            if tree is heeding:
                apply_hints(tree, end, len(prompt), CacheHints(), clock.now)
            tree.unlock(end)
        excess = max(0, alone.num_pages - pool)
        assert alone.evict(excess).tolist() == heeding.evict(excess).tolist()


def hits_of_belady(trace: list[int], size: int) -> int:
    """Evict what is needed latest; nothing can do better (Belady, 1966)."""
    held: set[int] = set()
    hits = 0
    for now, item in enumerate(trace):
        hits += item in held
        held.add(item)
        if len(held) > size:
            others = held - {item}
            later = {i: (trace[now:].index(i) if i in trace[now:] else len(trace)) for i in others}
            held.remove(max(others, key=later.__getitem__))
    return hits


@pytest.mark.parametrize("name", BASE_POLICIES)
@settings(max_examples=examples(100), deadline=None)
@given(trace=st.lists(st.integers(0, 8), max_size=60), size=st.integers(1, 6))
def test_clients_that_tell_their_whole_future_get_the_best_cache_there_is(
    name: EvictionPolicyName, trace: list[int], size: int
) -> None:
    clock = Clock()
    tree = RadixTree(1, make_policy(name, clock), clock)
    hits = 0
    for now, item in enumerate(trace):
        clock.now = float(now)
        found = tree.match(np.array([item], dtype=np.int32))
        hits += 0 if found is None else found.num_pages
        end = use(tree, [item], [now])
        tree.evict(max(0, tree.num_pages - size))
        later = trace[now + 1 :]
        hints = CacheHints(retain=[Retention("none")])
        if item in later:
            hints = CacheHints(next_use_s=later.index(item) + 1.0)
        apply_hints(tree, end, 1, hints, clock.now)
        tree.unlock(end)
    assert hits == hits_of_belady(trace, size)


class Cache:
    """A tree of pages of one token, told of requests that end at once."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tree = RadixTree(1, make_policy("lru", self.clock), self.clock)

    def request(self, tokens: list[int], at: float, next_use: float | None = None) -> None:
        """The page of a token has its number."""
        self.clock.now = at
        end = use(self.tree, tokens, tokens)
        hints = CacheHints(next_use_s=None if next_use is None else next_use - at)
        apply_hints(self.tree, end, len(tokens), hints, at)
        self.tree.unlock(end)

    def evict_all(self, at: float) -> list[int]:
        self.clock.now = at
        return [int(self.tree.evict(1)[0]) for _ in range(self.tree.num_evictable_pages)]


@pytest.mark.parametrize(("next_use", "goes_first"), [(19.5, 1), (20.5, 2), (30.0, 2)])
def test_what_is_unused_for_ten_seconds_is_taken_to_stay_unused_for_ten_more(
    next_use: float, goes_first: int
) -> None:
    cache = Cache()
    cache.request([1], at=0.0)
    cache.request([2], at=5.0, next_use=next_use)
    assert cache.evict_all(at=10.0)[0] == goes_first


@pytest.mark.parametrize(("due", "order"), [(3.0, [2, 1]), (5.0, [1, 2])])
def test_who_is_overdue_counts_as_having_come_when_it_was_due(due: float, order: list[int]) -> None:
    cache = Cache()
    cache.request([2], at=0.0, next_use=due)
    cache.request([1], at=4.0)
    assert cache.evict_all(at=10.0) == order


def test_what_is_above_an_evicted_leaf_is_needed_when_the_first_of_those_below_was() -> None:
    cache = Cache()
    for last, next_use in ((1, 15.0), (2, 60.0)):
        cache.request([7, last], at=0.0, next_use=next_use)
    cache.request([3], at=3.0)
    leased = cache.tree.match(np.array([3], dtype=np.int32))
    assert leased is not None
    stranger = cache.tree.lock_match(leased)
    cache.tree.pin(stranger)
    cache.clock.now = 10.0
    assert cache.tree.evict(2).tolist() == [2, 1]
    cache.tree.unpin(stranger)  # unused for seven seconds; the other is wanted in five
    assert cache.evict_all(at=10.0) == [3, 7]


# ------------------------------------------------------------ whole engines


def engine(**changes: object) -> tuple[EngineModel, Clock]:
    clock = Clock()
    return EngineModel(limits(**{"num_pages": 40, **changes}), clock), clock


def num_cached(model: EngineModel, prompt: list[int]) -> int:
    match = model.scheduler.state.kv.tree.match(np.array(prompt, dtype=np.int32))
    return 0 if match is None else match.num_pages * 4


def flood(model: EngineModel, first: int) -> None:
    """Strangers for more than the whole pool."""
    for stranger in range(first, first + 6):
        model.add([100 + stranger] * 40, max_tokens=1)
        model.run()


def test_high_retention_outlives_a_flood_until_it_expires_and_covers_no_more_than_it_says() -> None:
    model, clock = engine()
    prompt = list(range(50))
    keep = CacheHints(retain=[Retention("high", num_tokens=23, ttl_s=60)])
    model.add(prompt, max_tokens=1, cache_hints=keep)
    model.run()
    flood(model, 0)
    assert num_cached(model, prompt) == 20
    clock.now = 59
    flood(model, 10)
    assert num_cached(model, prompt) == 20
    clock.now = 60
    flood(model, 20)
    assert num_cached(model, prompt) == 0


def test_of_two_clients_the_one_that_wants_a_prefix_longer_is_heard() -> None:
    model, clock = engine()
    prompt = list(range(21))
    for ttl_s in (60.0, 10.0):
        keep = CacheHints(retain=[Retention("high", ttl_s=ttl_s)])
        model.add(prompt, max_tokens=1, cache_hints=keep)
        model.run()
    model.add(prompt, max_tokens=1, cache_hints=CacheHints(retain=[Retention("none")]))
    model.run()
    clock.now = 30
    flood(model, 0)
    assert num_cached(model, prompt) == 20


def test_what_is_worth_nothing_goes_first_but_not_the_prefix_that_others_share() -> None:
    model, _ = engine()
    document = list(range(20))
    model.add([*document, *[60] * 20], max_tokens=1)
    model.run()
    model.add(
        [*document, *[61] * 20], max_tokens=1, cache_hints=CacheHints(retain=[Retention("none")])
    )
    model.run()  # used last, and yet the first to go
    evicted = model.scheduler.state.kv.tree.evict(5)
    model.scheduler.state.kv.allocator.free(evicted)
    assert num_cached(model, [*document, *[61] * 20]) == 20
    assert num_cached(model, [*document, *[60] * 20]) == 40


def test_whoever_goes_on_from_what_was_worth_nothing_makes_it_worth_keeping() -> None:
    model, _ = engine()
    prompt = list(range(20))
    model.add(prompt, max_tokens=1, cache_hints=CacheHints(retain=[Retention("none")]))
    model.run()
    model.add([50] * 20, max_tokens=1)
    model.run()
    model.add(prompt, max_tokens=1)
    model.run()
    model.scheduler.state.kv.allocator.free(model.scheduler.state.kv.tree.evict(5))
    assert num_cached(model, prompt) == 20


def test_a_hint_counts_from_the_end_of_its_request_and_not_from_a_retraction() -> None:
    model = EngineModel(limits(num_pages=30, context_length=100), reckless=True)
    first = model.add([1] * 8, max_tokens=80, ignore_eos=True)
    keep = CacheHints(retain=[Retention("high")], session="agent")
    second = model.add([2] * 8, max_tokens=80, ignore_eos=True, cache_hints=keep)
    while not model.scheduler.state.counters.retractions:
        model.plan()
        model.absorb()
    assert len(model.scheduler.state.kv.sessions) == 0
    model.run()
    assert {first, second} <= set(model.finished) and len(model.scheduler.state.kv.sessions) == 1
    assert any(node.hint is not None for node in model.scheduler.state.kv.tree.nodes())


def test_turns_of_a_chat_with_the_same_wish_are_one_edge() -> None:
    model, _ = engine(num_pages=60)
    hints = CacheHints(retain=[Retention("high")], next_use_s=30.0, session="chat")
    history = [1, 2, 3]
    for turn in range(6):
        seq_id = model.add([*history, 10 + turn], max_tokens=11, cache_hints=hints)
        model.run()
        history = [*history, 10 + turn, *model.answers[seq_id]]
    assert model.scheduler.state.kv.tree.num_nodes <= 3


# ------------------------------------------------------------ sessions


def test_a_session_that_ended_goes_first_and_leaves_what_it_shared() -> None:
    model, _ = engine(num_pages=64)
    system = list(range(16))
    for name in ("one", "two"):
        for turn in range(3):
            prompt = [*system, *[60 + len(name)] * (8 + 8 * turn), turn]
            if name == "two":
                prompt = [*system, *[70] * (8 + 8 * turn), turn]
            hints = CacheHints(session=name, retain=[Retention("high")])
            model.add(prompt, max_tokens=1, cache_hints=hints)
            model.run()
    released = model.scheduler.release_session("two")
    assert released == 24  # in spite of "high", which it asked for itself
    assert model.scheduler.release_session("two") == 0, "it is forgotten"
    assert model.scheduler.release_session("one", CacheRoot(salt="other")) == 0
    model.scheduler.state.kv.allocator.free(model.scheduler.state.kv.tree.evict(6))
    assert num_cached(model, [*system, *[70] * 24]) == 16
    assert num_cached(model, [*system, *[63] * 24]) == 40


def test_a_session_does_not_let_go_of_what_still_runs() -> None:
    model, _ = engine()
    model.add([5] * 20, max_tokens=1, cache_hints=CacheHints(session="s"))
    model.run()
    model.add([5] * 20, max_tokens=5, ignore_eos=True, cache_hints=CacheHints(session="s"))
    model.plan()
    assert model.scheduler.release_session("s") == 4, (
        "the page with the last token is computed anew"
    )
    model.run()
    assert model.scheduler.release_session("s") == 24


requests = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.lists(st.integers(0, 1), max_size=5)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(200), deadline=None)
@given(requests=requests, ended=st.integers(0, 3))
def test_the_pages_of_an_ended_session_go_before_any_of_another(
    requests: list[tuple[int, int, list[int]]], ended: int
) -> None:
    clock = Clock()
    tree = RadixTree(1, make_policy("lru", clock), clock)
    sessions, next_page = Sessions(tree), 0
    paths: dict[int, set[tuple[int, ...]]] = {name: set() for name in range(4)}
    for name, shared, tail in requests:
        # a piece of a common beginning, then tokens that no other session has
        prompt = [9] * shared + [10 * (name + 1) + token for token in (0, *tail)]
        pages = list(range(next_page, next_page + len(prompt)))
        next_page += len(prompt)
        end = use(tree, prompt, pages)
        sessions.note(str(name), BASE_ROOT, end)
        tree.unlock(end)
        paths[name] |= {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
    others = set().union(*(paths[name] for name in paths if name != ended))
    if sum(name == ended for name, *_ in requests) <= ENDS_PER_SESSION:
        assert sessions.release(str(ended), BASE_ROOT) == len(paths[ended] - others)
        tree.evict(len(paths[ended] - others))
    for path in others:
        match = tree.match(np.array(path, dtype=np.int32))
        assert match is not None and match.num_pages == len(path)
    assert not paths[ended] - others or tree.num_pages == len(others)


def test_the_sessions_that_are_remembered_are_bounded() -> None:
    tree = RadixTree(1)
    sessions = Sessions(tree, max_sessions=3)
    for name in range(5):
        end = use(tree, [name], [name])
        sessions.note(str(name), BASE_ROOT, end)
        tree.unlock(end)
    assert len(sessions) == 3
    assert [sessions.release(str(name), BASE_ROOT) for name in range(5)] == [0, 0, 1, 1, 1]


def test_sessions_whose_kv_was_evicted_are_forgotten() -> None:
    tree = RadixTree(1)
    sessions = Sessions(tree)
    kept = use(tree, [1000], [1000])
    sessions.note("kept", BASE_ROOT, kept)
    for name in range(100):
        end = use(tree, [name], [name])
        sessions.note(str(name), BASE_ROOT, end)
        tree.unlock(end)
        if name % 2:
            tree.evict(2)
    assert len(sessions) <= 5
    tree.unlock(kept)
    assert sessions.release("kept", BASE_ROOT) == 1
