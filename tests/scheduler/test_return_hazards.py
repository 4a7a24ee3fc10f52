"""Eviction by learned odds of return: what is learned against plain arithmetic, what is evicted
against a search of all leaves, and hits against those of LRU."""

import math
import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest, read_trace
from radixrt.scheduler.radix.eviction import ByValue
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.return_hazards import (
    EVEN_ODDS,
    FIRST_FIT,
    NUM_CLASSES,
    PRIOR_VISITS,
    SHIFT_S,
    ReturnHazards,
    Visit,
)

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"

# ------------------------------------------------------------ what is learned

ANSWERS = [1, 30, 1000]
outcomes = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from(ANSWERS),
        st.integers(0, 9),
        st.none() | st.floats(0, 900),
    ),
    min_size=FIRST_FIT,
    max_size=FIRST_FIT,
)
"""Turns, answers and pages of visits, and the seconds until each returned."""


@settings(max_examples=60, deadline=None)
@given(outcomes=outcomes)
def test_odds_are_what_has_returned_over_what_would_have_if_all_were_alike(
    outcomes: list[tuple[int, int, int, float | None]],
) -> None:
    hazards, now = ReturnHazards(), 1000.0
    for turn, answer, pages, waited in outcomes:
        visit = Visit(turn)
        hazards.end(visit, answer, pages, 0.0)
        if waited is not None:
            hazards.begin(visit, waited)
            hazards.begin(visit, waited + 5)  # the first return counts

    def sums(chosen: list[tuple[int, int, int, float | None]]) -> tuple[float, float]:
        returned = sum(max(1, pages) for *_, pages, waited in chosen if waited is not None)
        exposed = 0.0
        for *_, pages, waited in chosen:
            exposed += max(1, pages) * math.log((now if waited is None else waited) / SHIFT_S + 1)
        return returned, exposed

    all_returned, all_exposed = sums(outcomes)
    prior = PRIOR_VISITS * sum(max(1, pages) for *_, pages, _ in outcomes) / len(outcomes)
    for turn in (1, 2, 3):
        for answer in ANSWERS:
            returned, exposed = sums([one for one in outcomes if one[:2] == (turn, answer)])
            expected = exposed * all_returned / max(all_exposed, 1e-9)
            odds = math.log2((returned + prior) / (expected + prior))
            visit = Visit(turn)
            hazards.end(visit, answer, 1, now)  # the first one learns from those before it
            kind = min(max(odds + EVEN_ODDS, 0), NUM_CLASSES - 1)
            assert abs(visit.kind - kind) <= 0.5 + 1e-6


@settings(max_examples=60, deadline=None)
@given(turn=st.integers(1, 10**6), answer=st.integers(0, 10**8), age_s=st.floats(-1e9, 1e12))
def test_every_visit_has_a_class_and_every_age_a_hazard(
    turn: int, answer: int, age_s: float
) -> None:
    hazards, visit = ReturnHazards(), Visit(turn)
    hazards.end(visit, answer, 3, 0.0)
    assert visit.kind == EVEN_ODDS and hazards.hazard(visit.kind, age_s) > 0


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
    hazards.end(learned := Visit(), 1, 1, 100.0)
    assert learned.kind > EVEN_ODDS
    for number in range(200):
        hazards.end(Visit(), 1000, 1, 200.0 + number)
    again = hazards.begin(first, 500.0)
    assert again.turn == 2
    hazards.end(forgotten := Visit(), 1, 1, 501.0)
    assert forgotten.kind == EVEN_ODDS


# ------------------------------------------------------------ what is evicted


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.integers(0, NUM_CLASSES - 1), min_size=1, max_size=40),
    learned_rules=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_leaf_is_evicted_that_a_search_of_all_leaves_finds(
    kinds: list[int], learned_rules: bool, seed: int
) -> None:
    rng, now = np.random.default_rng(seed), 1000.0
    policy, root = ByValue(lambda: now), Node(None, b"", b"")
    policy.hazards.learned_rules = learned_rules
    leaves = []
    for number, kind in enumerate(kinds):
        leaf = Node(root, b"%04d" % number, b"page", visit=Visit(kind=kind))
        leaf.stamp = int(1e9 * rng.uniform(0, now)) + number
        policy.offer(leaf)
        leaves.append(leaf)

    def order(leaf: Node) -> float:
        odds = 2.0**leaf.visit.kind if leaf.visit is not None else 0.0
        return odds / (now - leaf.stamp * 1e-9 + SHIFT_S) if learned_rules else leaf.stamp

    for _ in kinds:
        chosen = policy.pop()
        assert chosen is min(leaves, key=order)
        leaves.remove(chosen)
        chosen.detach()
    assert policy.pop() is None


def test_a_duel_is_decided_by_what_returns() -> None:
    hazards = ReturnHazards()

    def bets(count: int, learned_keeps_it: bool) -> None:
        for _ in range(count):
            returns, other = Visit(num_pages=3), Visit(num_pages=3)
            hazards.bet(*((other, returns) if learned_keeps_it else (returns, other)))
            hazards.begin(returns, 1.0)

    assert not hazards.learned_rules
    bets(30, learned_keeps_it=True)
    assert hazards.learned_rules
    bets(60, learned_keeps_it=False)
    assert not hazards.learned_rules
    for _ in range(60):
        same = Visit(num_pages=100)
        hazards.bet(same, same)
        hazards.begin(same, 1.0)
    assert not hazards.learned_rules, "where they agree, nobody wins"


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


def test_what_was_learned_wrongly_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats end and documents return, after the opposite was learned."""
    traffic = Traffic()
    traffic.chats(0, pause_s=60, turns=12)
    traffic.documents(0, 720)
    for start in range(720, 1440, 60):
        traffic.chats(start, pause_s=60, turns=1)
    traffic.documents(720, 1440, again_s=20)
    trace = traffic.trace()
    lru, value = hits(trace, "lru", 600), hits(trace, "value", 600)
    monkeypatch.setattr(ReturnHazards, "learned_rules", property(lambda _: True, lambda *_: None))
    assert value >= lru - 0.3 and hits(trace, "value", 600) < lru - 2


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
@pytest.mark.skipif("RADIXRT_EVICTION_EXAMPLES" not in os.environ, reason="takes minutes")
@pytest.mark.parametrize("name", ["conversation_first60", "synthetic", "agent_dev"])
@pytest.mark.parametrize("pool_blocks", [1024, 2048, 4096, 8192, 16384])
def test_recorded_traffic_is_never_served_worse_than_by_lru(name: str, pool_blocks: int) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    assert hits(trace, "value", pool_blocks) >= hits(trace, "lru", pool_blocks) - 0.3
