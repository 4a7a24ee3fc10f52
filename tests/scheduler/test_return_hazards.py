"""Eviction by learned odds of return: what is learned against plain arithmetic, what is evicted
against a search of all leaves, and hits against those of LRU."""

import math
import os
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest, read_trace
from radixrt.scheduler.radix.eviction import SMALLEST_REBUILD, ByValue, LeafHeap
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.return_hazards import (
    CLASSES_PER_OCTAVE,
    EVEN_ODDS,
    FIRST_FIT,
    MAX_VISITS,
    NUM_CLASSES,
    SHARED,
    ReturnHazards,
    Visit,
)
from tests.scheduler.engine_model import EngineModel, limits

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"

# ------------------------------------------------------------ what is learned


def learn(
    hazards: ReturnHazards, turn: int, answer: int, pages: int, waited_s: float | None
) -> None:
    """One more visit that ended at 0 and returned after so many seconds, or not."""
    visit = Visit(turn)
    hazards.end(visit, answer, pages, 0.0)
    if waited_s is not None:
        hazards.begin(visit, waited_s)
        hazards.begin(visit, waited_s + 5)  # the first return counts


def class_of(hazards: ReturnHazards, turn: int, answer: int, now: float) -> int:
    visit = Visit(turn)
    hazards.end(visit, answer, 1, now)
    return visit.kind


def test_odds_that_returns_were_drawn_with_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns and answers multiply the odds, each by their own factor."""
    rng, hazards, now = np.random.default_rng(0), ReturnHazards(), 400.0
    of_turn, of_answer = {1: 1.0, 2: 2.0, 3: 4.0}, {1: 1.0, 1000: 4.0}
    for _ in range(MAX_VISITS):
        turn, answer = int(rng.choice(list(of_turn))), int(rng.choice(list(of_answer)))
        waited_s = rng.exponential(1600 / of_turn[turn] / of_answer[answer])
        learn(hazards, turn, answer, int(rng.integers(1, 9)), waited_s if waited_s < now else None)
    monkeypatch.setattr("radixrt.scheduler.radix.return_hazards.FIT_EVERY", 1)
    for _ in range(300):  # the next fit, and more
        hazards.end(Visit(), 1, 1, now)
    base = class_of(hazards, 1, 1, now)
    for turn, answer in product(of_turn, of_answer):
        octaves = math.log2(of_turn[turn] * of_answer[answer])
        learned = (class_of(hazards, turn, answer, now) - base) / CLASSES_PER_OCTAVE
        assert abs(learned - octaves) <= 0.5, (turn, answer)


def test_short_pauses_before_a_visit_tell_of_its_return() -> None:
    hazards = ReturnHazards()
    for number in range(FIRST_FIT):
        for pause_s in (3.0, 300.0):
            visit = Visit(2, pause_s)
            hazards.end(visit, 8, 4, 0.0)
            if pause_s < 9:
                hazards.begin(visit, 1.0 + number)
    kinds = []
    for pause_s in (3.0, 300.0, 70.0):
        visit = Visit(2, pause_s)
        hazards.end(visit, 8, 4, 400.0)
        kinds.append(visit.kind)
    assert kinds[0] > EVEN_ODDS > kinds[1], "and of a pause never seen, nothing is known"
    assert abs(kinds[2] - EVEN_ODDS) <= CLASSES_PER_OCTAVE


def test_one_return_of_its_kind_says_little() -> None:
    hazards = ReturnHazards()
    learn(hazards, 1, 1000, 4, 0.6)
    for number in range(2 * FIRST_FIT):
        learn(hazards, 1, 8, 4, 50.0 if number % 2 else None)
    assert abs(class_of(hazards, 1, 1000, 400.0) - EVEN_ODDS) <= CLASSES_PER_OCTAVE


def test_the_rate_is_the_best_of_any_time_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the arithmetic of all horizons."""
    monkeypatch.setattr("radixrt.scheduler.radix.return_hazards.FIRST_FIT", 200)
    rng, hazards, now, outcomes = np.random.default_rng(1), ReturnHazards(), 5000.0, []
    for _ in range(200):  # a third soon, a third after a pause, a third never
        waited_s = [rng.uniform(0, 3), rng.uniform(40, 90), None][int(rng.integers(3))]
        outcomes.append((int(rng.integers(1, 9)), waited_s))
        learn(hazards, 1, 1, *outcomes[-1])
    hazards.end(Visit(), 1, 1, now)
    ages = [0.0, *(2 ** (step / 2 - 1) for step in range(34))]

    def rate(start: float, end: float) -> float:
        returned, spent = 0.0, end - start
        for pages, waited_s in outcomes:
            until = now if waited_s is None else waited_s
            spent += pages * max(0.0, min(until, end) - start)
            returned += pages * (waited_s is not None and start <= waited_s < end)
        return returned / spent

    for start, age_s in zip(ages[:-2], (0.2, *(age * 1.2 for age in ages[1:-2])), strict=True):
        best = max(rate(start, end) for end in ages if end > start)
        assert hazards.rate(EVEN_ODDS, age_s) == pytest.approx(best)
    assert hazards.rate(EVEN_ODDS, 10.0) > 3 * hazards.rate(EVEN_ODDS, 200.0)
    assert hazards.rate(EVEN_ODDS + CLASSES_PER_OCTAVE, 10.0) == 2 * hazards.rate(EVEN_ODDS, 10.0)


@settings(max_examples=60, deadline=None)
@given(turn=st.integers(1, 10**6), answer=st.integers(0, 10**8), age_s=st.floats(-1e9, 1e12))
def test_every_visit_has_a_class_and_every_age_a_rate(turn: int, answer: int, age_s: float) -> None:
    hazards = ReturnHazards()
    visit = hazards.begin(Visit(turn, ended_s=-abs(age_s)), 0.0)
    hazards.end(visit, answer, 3, 0.0)
    assert visit.kind == EVEN_ODDS and hazards.rate(visit.kind, age_s) > 0


def test_visits_without_a_page_are_no_error() -> None:
    hazards = ReturnHazards()
    for number in range(100):
        visit = hazards.begin(None, float(number))
        hazards.end(visit, 2, 0, float(number))
    assert visit.kind == EVEN_ODDS


def test_visits_that_are_forgotten_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.scheduler.radix.return_hazards.MAX_VISITS", 64)
    hazards, first = ReturnHazards(), Visit()
    for number in range(FIRST_FIT):  # of two classes, one of which returns
        for answer in (1, 1000):
            hazards.end(visit := Visit(), answer, 1, float(number))
            if answer == 1:
                first = visit
                hazards.begin(visit, number + 1.0)
    assert class_of(hazards, 1, 1, 100.0) > EVEN_ODDS
    for number in range(200):
        hazards.end(Visit(), 1000, 1, 200.0 + number)
    assert hazards.begin(first, 500.0).turn == 2
    assert class_of(hazards, 1, 1, 501.0) == EVEN_ODDS


# ------------------------------------------------------------ what is evicted


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.integers(0, NUM_CLASSES - 1), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_the_leaf_is_evicted_that_a_search_of_all_leaves_finds(kinds: list[int], seed: int) -> None:
    rng, now = np.random.default_rng(seed), 1000.0
    policy, root, leaves = ByValue(lambda: now), Node(None, b"", b""), []
    for number, kind in enumerate(kinds):
        leaf = Node(root, b"%04d" % number, b"page", visit=Visit(kind=kind))
        leaf.stamp = int(1e9 * rng.uniform(0, now)) + number
        policy.offer(leaf)
        leaves.append(leaf)

    def rate(leaf: Node) -> float:
        assert leaf.visit is not None
        return policy.hazards.rate(leaf.visit.kind, now - leaf.stamp * 1e-9)

    for _ in kinds:
        oldest = min(leaves, key=lambda leaf: leaf.stamp)
        least = min(leaves, key=lambda leaf: (rate(leaf), leaf.stamp))
        chosen = policy.pop()
        assert chosen is (least if 2 * rate(least) <= rate(oldest) else oldest)
        leaves.remove(chosen)
        chosen.detach()
    assert policy.pop() is None


def test_the_newest_leaf_goes_first_where_prefixes_return_after_a_pause() -> None:
    """While a return comes nearer, the longer wait is the better reason to stay."""
    policy, root, now = ByValue(lambda: 100.0), Node(None, b"", b""), 100.0
    for _ in range(FIRST_FIT + 1):
        visit = Visit()
        policy.hazards.end(visit, 8, 1, now - 70)
        policy.hazards.begin(visit, now - 10)  # after 60 s
    young, old = (
        Node(root, key, b"page", stamp=int(1e9 * at)) for key, at in ((b"y", 99), (b"o", 55))
    )
    for leaf in (young, old):
        policy.offer(leaf)
    assert policy.pop() is young and policy.pop() is old


# ------------------------------------------------------------ who visits


class Visits:
    """A scheduler that notes the visits that begin and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reckless: bool = False) -> None:
        self.begun: list[Visit | None] = []
        self.ended: list[tuple[Visit, int, int]] = []
        """With the tokens of the answer and the pages of its own."""
        begin, end = ReturnHazards.begin, ReturnHazards.end

        def note_begin(hazards: ReturnHazards, before: Visit | None, now: float) -> Visit:
            self.begun.append(before)
            return begin(hazards, before, now)

        def note_end(hazards: ReturnHazards, visit: Visit, *of: Any) -> None:
            self.ended.append((visit, *of[:2]))
            end(hazards, visit, *of)

        monkeypatch.setattr(ReturnHazards, "begin", note_begin)
        monkeypatch.setattr(ReturnHazards, "end", note_end)
        self.model = EngineModel(limits(num_pages=30, context_length=100), reckless=reckless)

    def ask(self, prompt: list[int], **options: Any) -> tuple[list[int], Visit]:
        """The prompt with its answer, and the visit."""
        seq_id = self.model.add(prompt, **options)
        self.model.run()
        return prompt + self.model.answers[seq_id], self.ended[-1][0]


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    return Visits(monkeypatch)


def test_a_turn_goes_on_with_the_one_before(visits: Visits) -> None:
    said, first = visits.ask([1] * 16, max_tokens=6)
    _, second = visits.ask([*said, 2, 2, 2], max_tokens=2)
    assert visits.begun == [None, first] and (first.turn, second.turn) == (1, 2)
    assert [(output, pages) for _, output, pages in visits.ended] == [(6, 5), (2, 6)]


def test_an_evicted_turn_returns_too(visits: Visits) -> None:
    said, first = visits.ask([1] * 16)
    for other in (3, 4):
        visits.ask([other] * 90)
    visits.ask([*said, 2, 2, 2])
    assert visits.begun == [None, None, None, first]


def test_less_than_half_of_a_prefix_is_no_return(visits: Visits) -> None:
    visits.ask([1] * 40)
    visits.ask([1] * 16 + [2] * 24)
    assert visits.begun == [None, None]


def test_a_request_that_reads_no_cache_returns_to_nothing(visits: Visits) -> None:
    said, _ = visits.ask([1] * 16)
    visits.ask([*said, 2, 2], prompt_logprobs=1)
    for other in (3, 4):
        visits.ask([other] * 90)
    visits.ask([*said, 2, 2], prompt_logprobs=1)
    assert visits.begun == [None] * 5


def test_what_has_no_visit_leaves_that_of_its_prefix() -> None:
    node, visit = Node(None, b"", b""), Visit()
    for noted in (visit, None):
        node.note_visit(noted)
    assert node.visit is visit
    node.visit = SHARED
    node.note_visit(visit)
    assert node.visit is SHARED


def test_a_heap_whose_leaves_leave_by_another_stays_small() -> None:
    root, heap = Node(None, b"", b""), LeafHeap(most=3)
    leaves = [Node(root, b"%08d" % number, b"page") for number in range(SMALLEST_REBUILD + 1)]
    for number, leaf in enumerate(leaves):
        heap.push(-number, leaf)
    assert len(heap) == 3
    assert [heap.pop() for _ in range(4)] == [*leaves[:-4:-1], None]


def test_a_prefix_with_several_continuations_belongs_to_none_of_them(visits: Visits) -> None:
    document = [1] * 40
    for question in (2, 3, 4, 5):
        visits.ask(document + [question] * 7)
    assert [before is None for before in visits.begun] == [True, False, True, True]
    assert [pages for _, _, pages in visits.ended] == [12, 2, 2, 2]
    tree = visits.model.scheduler.state.kv.tree
    shared = [len(node.prefix_pages()) for node in tree.nodes() if node.visit is SHARED]
    assert shared == [10]


def test_a_retracted_request_is_one_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits(monkeypatch, reckless=True)
    for prompt in ([1] * 8, [2] * 8):
        visits.model.add(prompt, max_tokens=80, ignore_eos=True)
    visits.model.run()
    assert visits.model.scheduler.state.counters.retractions
    assert len(visits.begun) == len(visits.ended) == 2


# ------------------------------------------------------------ what is found


class Traffic:
    """Chats that go on, between single questions about long documents."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []
        self._blocks = 0

    def prompt(self, length: int) -> list[int]:
        self._blocks += length
        return list(range(self._blocks - length, self._blocks))

    def ask(self, at: float, blocks: list[int], answer: int) -> None:
        prompt = np.array(blocks, dtype=np.int64)
        self.requests.append(TraceRequest(at, len(blocks) * BLOCK_TOKENS, answer, prompt))

    def chats(self, start: float, pause_s: float, turns: int, count: int = 25) -> None:
        for number in range(count):
            blocks = self.prompt(8)
            for turn in range(turns):
                self.ask(start + number * pause_s / count + turn * pause_s, blocks, 800)
                blocks = blocks + self.prompt(1)

    def documents(self, start: float, end: float, again_s: float | None = None) -> None:
        for at in np.arange(start, end):
            blocks = self.prompt(16)
            self.ask(float(at), blocks, 8)
            if again_s is not None:
                self.ask(float(at) + again_s, [*blocks, *self.prompt(1)], 8)

    def trace(self) -> Trace:
        return Trace("made", sorted(self.requests, key=lambda request: request.arrival_s))


def hits(trace: Trace, policy: str, pool_blocks: int) -> float:
    """Percent of the prompt tokens."""
    run = replay(trace, Setup(pool_blocks * BLOCK_TOKENS, policy, "lpm"))  # type: ignore[arg-type]
    return 100 * sum(run.cached_tokens) / trace.prompt_tokens


def test_chats_outlive_documents_that_nobody_asks_about_again() -> None:
    traffic = Traffic()
    traffic.chats(0, pause_s=60, turns=12)
    traffic.documents(0, 720)
    trace = traffic.trace()
    assert hits(trace, "lru", 600) < 1 and hits(trace, "value", 600) > 8


def test_what_was_learned_wrongly_costs_little() -> None:
    """Chats end and documents return, after the opposite was learned."""
    traffic = Traffic()
    traffic.chats(0, pause_s=60, turns=12)
    traffic.documents(0, 720)
    for start in range(720, 1440, 60):
        traffic.chats(start, pause_s=60, turns=1)
    traffic.documents(720, 1440, again_s=20)
    trace = traffic.trace()
    assert hits(trace, "value", 1000) >= hits(trace, "lru", 1000) - 0.3


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
@pytest.mark.skipif("RADIXRT_EVICTION_EXAMPLES" not in os.environ, reason="takes minutes")
@pytest.mark.parametrize("name", ["conversation_first60", "synthetic", "agent_dev"])
@pytest.mark.parametrize("pool_blocks", [1024, 2048, 4096, 8192, 16384])
def test_recorded_traffic_is_never_served_worse_than_by_lru(name: str, pool_blocks: int) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    assert hits(trace, "value", pool_blocks) >= hits(trace, "lru", pool_blocks) - 0.3
