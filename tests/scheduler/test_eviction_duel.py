"""What the duel learns from, each part against plain arithmetic, and that it wins where it should."""

from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.scheduler.eviction.duel import Duel
from radixrt.scheduler.eviction.page_sample import PageSample
from radixrt.scheduler.eviction.return_hazards import (
    NUM_BINS,
    NUM_CLASSES,
    PRIOR_PAGES,
    ReturnHazards,
    age_bin,
)
from radixrt.scheduler.eviction.shadow_cache import ShadowCache
from radixrt.scheduler.eviction.visit_history import VisitHistory

requests = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=7).map(
        lambda steps: [hash(tuple(steps[: i + 1])) for i in range(len(steps))]
    ),
    max_size=40,
)
"""Prompts as the hashes of their prefixes: two share hashes exactly as far as they agree."""


# ------------------------------------------------------------ which pages are watched


def test_equal_prefixes_have_equal_hashes_and_others_do_not() -> None:
    sample = PageSample(page_size=4, one_in=1)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 32_000, 401).astype(np.int32)
    whole = sample.pick(tokens, "")
    assert len(whole) == len(set(whole)) == 100
    assert sample.pick(tokens[:43], "") == whole[:10]
    changed = tokens.copy()
    changed[41] += 1
    assert [a == b for a, b in zip(whole, sample.pick(changed, ""), strict=True)] == (
        [True] * 10 + [False] * 90
    )
    assert not set(whole) & set(sample.pick(tokens, "tenant"))
    swapped = np.concatenate((tokens[4:8], tokens[:4], tokens[8:]))
    assert not set(whole) & set(sample.pick(swapped, ""))
    assert PageSample(4, 1).pick(tokens, "") == whole, "another process picks the same pages"


def test_one_page_in_sixteen_is_watched_and_the_same_for_everyone() -> None:
    every, some = PageSample(2, 1), PageSample(2, 16)
    tokens = np.arange(40_000, dtype=np.int32)
    picked = some.pick(tokens, "")
    assert set(picked) <= set(every.pick(tokens, ""))
    assert len(picked) == pytest.approx(20_000 / 16, rel=0.15)
    assert some.pick(tokens[:1], "") == []


# ------------------------------------------------------------ what is learned


observations = st.lists(
    st.tuples(
        st.sampled_from(["return", "wait", "watched"]),
        st.integers(0, NUM_CLASSES - 1),
        st.floats(0, 5000),
        st.integers(1, 9),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(observations=observations, kind=st.integers(0, NUM_CLASSES - 1), age=st.floats(0, 5000))
def test_the_index_is_the_best_quotient_of_returns_and_page_seconds(
    observations: list[tuple[str, int, float, int]], kind: int, age: float
) -> None:
    hazards = ReturnHazards()
    for what, of_kind, after, pages in observations:
        if what == "return":
            hazards.observe_return(of_kind, after, pages)
        elif what == "wait":
            hazards.observe_wait(of_kind, after, pages)
    hazards.refresh([o[1:] for o in observations if o[0] == "watched"])

    starts = [0.0] + [0.5 * 2 ** (i / 2) for i in range(NUM_BINS - 1)]
    widths = [b - a for a, b in zip(starts, [*starts[1:], 2 * starts[-1]], strict=True)]

    def returns(of_kind: int | None, bin_: int) -> float:
        return sum(
            pages
            for what, other, after, pages in observations
            if what == "return" and other in (of_kind, other if of_kind is None else of_kind)
            and starts[bin_] <= after < starts[bin_] + widths[bin_]
        )  # fmt: skip

    def waited(of_kind: int | None, bin_: int) -> float:
        return sum(
            pages * min(max(after - starts[bin_], 0.0), widths[bin_])
            for _, other, after, pages in observations
            if of_kind is None or other == of_kind
        )

    best, above, below = 0.0, 0.0, 0.0
    for bin_ in range(age_bin(age), NUM_BINS):
        prior = PRIOR_PAGES * widths[bin_]
        above += returns(kind, bin_) + prior * returns(None, bin_) / (
            waited(None, bin_) + widths[bin_]
        )
        below += waited(kind, bin_) + prior
        best = max(best, above / below)
    assert hazards.index(kind, age) == pytest.approx(best, rel=1e-6, abs=1e-12)


def chat(turns: int, pages_a_turn: int = 4, name: str = "") -> list[list[int]]:
    """The prompts of a conversation behind a system prompt of one page, as hashes."""
    pages = [-1] + [hash((name, page)) for page in range(turns * pages_a_turn)]
    return [pages[: 1 + pages_a_turn * turn] for turn in range(1, turns + 1)]


def test_turns_are_counted_along_a_conversation_and_not_through_a_system_prompt() -> None:
    history = VisitHistory(1000, ReturnHazards())
    for number, prompt in enumerate(chat(5, name="a")):
        assert history.record(prompt, now=10.0 * number).turns == number + 1
        # strangers with the same system prompt come in between
        stranger = chat(1, name=f"stranger {number}")[0]
        assert history.record(stranger, now=10.0 * number + 1).turns == 1


@settings(max_examples=100, deadline=None)
@given(requests=requests, limit=st.integers(5, 30))
def test_history_watches_each_page_once_and_keeps_to_its_size(
    requests: list[list[int]], limit: int
) -> None:
    history, last = VisitHistory(limit, ReturnHazards()), OrderedDict[int, float]()
    for number, pages in enumerate(requests):
        history.record(pages, float(number))
        for page in pages:
            last[page] = float(number)
            last.move_to_end(page)
        while len(last) > limit:  # a whole visit is forgotten at a time, the oldest
            oldest = min(last.values())
            last = OrderedDict((p, t) for p, t in last.items() if t != oldest)
        ages = sorted(number - time for time in last.values())
        watched = history.watched(float(number))
        assert sorted(age for _, age, count in watched for _ in range(count)) == ages


@settings(max_examples=100, deadline=None)
@given(requests=requests, size=st.integers(1, 20))
def test_a_shadow_of_lru_finds_what_lru_finds(requests: list[list[int]], size: int) -> None:
    shadow, model = ShadowCache(size, 1, lambda ends: ends[0]), OrderedDict[int, None]()
    for number, pages in enumerate(requests):
        found = 0
        while found < len(pages) and pages[found] in model:
            found += 1
        assert shadow.num_found(pages) == found
        shadow.use(pages, 0, float(number))
        for page in reversed(pages):  # the end of a prefix goes before what it continues
            model[page] = None
            model.move_to_end(page)
        while len(model) > size:
            model.popitem(last=False)
        assert len(shadow) == len(model)


def test_prompts_that_come_again_and_again_leave_nothing_behind() -> None:
    hot, size = list(range(10)), 20
    history, shadow = VisitHistory(size, ReturnHazards()), ShadowCache(size, 1, lambda e: e[0])
    keeps_all = VisitHistory(10**6, ReturnHazards())
    for number in range(1000):
        pages = [*hot[: 10 - number % 7], 100 + number % 5]
        visit, expected = (h.record(pages, float(number)) for h in (history, keeps_all))
        assert (visit.turns, visit.kind) == (expected.turns, expected.kind)
        shadow.use(pages, 0, float(number))
    kept = (history._visits, shadow._stacks[0])
    assert all(sum(len(entry.pages) for entry in entries) <= 5 * size for entries in kept)
    assert [*history.watched(1000.0)] == [*keeps_all.watched(1000.0)]


# ------------------------------------------------------------ who rules


class Traffic:
    """Regulars who come every 20 s for an ever longer conversation, among strangers who never return."""

    def __init__(self, strangers_a_second: int) -> None:
        self.now = 0.0
        self._strangers = strangers_a_second
        self._ids = iter(range(10**6, 10**9))

    def send(self, policy: Duel, seconds: int) -> None:
        for second in range(seconds):
            for prompt in (*self._regular(second), *self._new()):
                policy.observe(np.array(prompt, dtype=np.int32), "")
            self.now += 1.0

    def _regular(self, second: int) -> list[list[int]]:
        turn, regular = divmod(second, 20)
        return [[10_000 * regular + token for token in range(40 + 8 * turn)]]

    def _new(self) -> list[list[int]]:
        return [[next(self._ids) for _ in range(40)] for _ in range(self._strangers)]


def test_return_hazard_takes_over_where_lru_loses_everyone_before_they_return() -> None:
    traffic = Traffic(strangers_a_second=10)
    duel = Duel(num_pages=1000, page_size=2, clock=lambda: traffic.now)
    assert not duel.hazard_rules, "LRU rules until something better is known"
    traffic.send(duel, seconds=400)
    assert duel.hazard_rules


def test_lru_stays_where_everybody_is_found_anyway() -> None:
    traffic = Traffic(strangers_a_second=1)
    duel = Duel(num_pages=20_000, page_size=2, clock=lambda: traffic.now)
    traffic.send(duel, seconds=400)
    assert not duel.hazard_rules
