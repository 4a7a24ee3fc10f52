"""What the duel learns from, each part against plain arithmetic, and that it wins where it should."""

from collections import OrderedDict
from itertools import takewhile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.scheduler.radix.eviction.duel import Duel
from radixrt.scheduler.radix.eviction.page_sample import PageSample
from radixrt.scheduler.radix.eviction.return_hazards import (
    EVEN_ODDS,
    NUM_BINS,
    NUM_CLASSES,
    NUM_LEVELS,
    Observations,
    ReturnHazards,
    age_bin,
    features_of,
)
from radixrt.scheduler.radix.eviction.shadow_cache import ShadowCache
from radixrt.scheduler.radix.eviction.visit_history import Visit, VisitHistory

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


visits = st.lists(
    st.tuples(
        st.tuples(*(st.integers(0, 2) for _ in NUM_LEVELS)),
        st.integers(1, 9),
        st.floats(0, 5000),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)
"""Levels of the features, watched pages, seconds until the return or until now, whether they returned."""


def observations(rows: list[tuple[tuple[int, ...], int, float, bool]]) -> Observations:
    features, pages, waited, returned = zip(*rows, strict=True)
    return Observations(
        np.array(features, dtype=np.intp),
        np.array(pages, dtype=np.float64),
        np.array(waited, dtype=np.float64),
        np.array(returned),
    )


STARTS = [0.0] + [0.5 * 2 ** (i / 2) for i in range(NUM_BINS - 1)]
WIDTHS = [b - a for a, b in zip(STARTS, [*STARTS[1:], 2 * STARTS[-1]], strict=True)]


def pages_returned(rows: list, bin_: int) -> float:
    stop = STARTS[bin_] + WIDTHS[bin_]
    return sum(n for _, n, after, returned in rows if returned and STARTS[bin_] <= after < stop)


def page_seconds(rows: list, bin_: int) -> float:
    waited = sum(n * min(max(t - STARTS[bin_], 0.0), WIDTHS[bin_]) for _, n, t, _ in rows)
    return waited + WIDTHS[bin_]  # as if one page more had waited through it all


@settings(max_examples=100, deadline=None)
@given(rows=visits, age=st.floats(0, 5000))
def test_the_index_is_the_best_quotient_of_returns_and_page_seconds(
    rows: list[tuple[tuple[int, ...], int, float, bool]], age: float
) -> None:
    hazards = ReturnHazards()
    hazards.fit(observations(rows))
    best, above, below = 0.0, 0.0, 0.0
    for bin_ in range(age_bin(age), NUM_BINS):
        above += pages_returned(rows, bin_)
        below += page_seconds(rows, bin_)
        best = max(best, above / below)
    assert hazards.index(EVEN_ODDS, age) == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert hazards.index(EVEN_ODDS + 2, age) == pytest.approx(2 * best, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_odds_are_found_again_in_traffic_that_was_made_with_them(seed: int) -> None:
    """Returns at random times from an exponential distribution; two features act, two do nothing."""
    rng, num_visits = np.random.default_rng(seed), 4000
    by_turns, by_output = np.array([0.5, 1.0, 2.0]), np.array([0.25, 1.0, 4.0])
    features = rng.integers(0, 3, (num_visits, len(NUM_LEVELS)))
    rate = 0.01 * by_turns[features[:, 0]] * by_output[features[:, 2]]
    returns_s, watched_s = rng.exponential(1 / rate), rng.uniform(0, 300, num_visits)
    hazards = ReturnHazards()
    hazards.fit(
        Observations(
            features, np.ones(num_visits), np.minimum(returns_s, watched_s), returns_s < watched_s
        )
    )
    kinds = [[hazards.classify((turns, 1, output, 1)) for output in range(3)] for turns in range(3)]
    low, even = kinds[0][0], kinds[1][1]
    for turns in range(3):
        for output in range(3):
            true = 2 * np.log2(by_turns[turns] * by_output[output])  # in classes
            assert abs(kinds[turns][output] - even - true) <= 1
    assert low < even
    assert abs(hazards.classify((1, 2, 1, 0)) - even) <= 1


@settings(max_examples=200, deadline=None)
@given(
    turns=st.integers(1, 10**6),
    pause_s=st.none() | st.floats(0, 1e6),
    num_prompt=st.integers(0, 10**7),
    num_output=st.none() | st.integers(0, 10**7),
)
def test_every_visit_has_levels_that_there_are(
    turns: int, pause_s: float | None, num_prompt: int, num_output: int | None
) -> None:
    features = features_of(turns, pause_s, num_prompt, num_output)
    assert all(0 <= level < n for level, n in zip(features, NUM_LEVELS, strict=True))
    assert 0 <= ReturnHazards().classify(features) < NUM_CLASSES


def chat(turns: int, pages_a_turn: int = 4, name: str = "") -> list[list[int]]:
    """The prompts of a conversation behind a system prompt of one page, as hashes."""
    pages = [-1] + [hash((name, page)) for page in range(turns * pages_a_turn)]
    return [pages[: 1 + pages_a_turn * turn] for turn in range(1, turns + 1)]


def test_turns_are_counted_along_a_conversation_and_not_through_a_system_prompt() -> None:
    history = VisitHistory(1000)
    for number, prompt in enumerate(chat(5, name="a")):
        visit = history.begin(prompt, 99, now=10.0 * number)
        assert visit.turns == number + 1
        assert visit.pause_s == (None if number == 0 else 7.0)
        history.end(visit, 9, now=10.0 * number + 3)
        # strangers with the same system prompt come in between
        stranger = chat(1, name=f"stranger {number}")[0]
        assert history.begin(stranger, 99, now=10.0 * number + 1).turns == 1
    seen = history.observations(now=50.0)
    assert seen is not None, "of the strangers none has ended"
    assert seen.waited_s.tolist() == [7.0, 7.0, 7.0, 7.0, 7.0]
    assert seen.returned.tolist() == [True] * 4 + [False]


@settings(max_examples=100, deadline=None)
@given(requests=requests, limit=st.integers(5, 30))
def test_history_knows_the_turn_before_as_long_as_its_size_allows(
    requests: list[list[int]], limit: int
) -> None:
    history, last = VisitHistory(limit), dict[int, int]()
    known: list[Visit] = []
    for number, pages in enumerate(requests):
        found = [last[page] for page in takewhile(last.__contains__, pages)]
        before = (
            known[found[-1]] if found and 2 * len(found) > len(known[found[-1]].pages) else None
        )
        visit = history.begin(pages, 9, float(number))
        assert visit.turns == (1 if before is None else before.turns + 1)
        known.append(visit)
        last |= dict.fromkeys(pages, number)
        while len(last) > limit:  # a whole visit is forgotten at a time, the oldest
            oldest = min(last.values())
            last = {page: n for page, n in last.items() if n != oldest}


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
    shadow = ShadowCache(size, 1, lambda ends: ends[0])
    for number in range(1000):
        shadow.use([*hot[: 10 - number % 7], 100 + number % 5], 0, float(number))
    assert sum(len(stack.pages) for stack in shadow._stacks[0]) <= 5 * size
    assert len(shadow) == 15


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
                use = policy.observe(np.array(prompt, dtype=np.int32), "")
                policy.observe_end(use, num_output=8)
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
