"""The forecast of pages against counting, one answer after the other."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from radixrt.scheduler.queue.output_history import HISTORY, PRIOR_WEIGHT, OutputHistory
from radixrt.scheduler.radix.node import Match
from radixrt.scheduler.sequence import Sequence
from tests.scheduler.engine_model import EngineModel, limits


def chance(history: OutputHistory, num_output: int, max_output: int, steps: int) -> float:
    arrays = (np.array([value]) for value in (num_output, max_output, steps))
    return float(history.chance_to_continue(*arrays)[0, 0])


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    num_output=st.integers(0, 60),
    steps=st.integers(0, 60),
    max_output=st.integers(61, 200),
)
def test_chances_are_shares_of_the_answers_that_went_on(
    lengths: list[int], num_output: int, steps: int, max_output: int
) -> None:
    history = OutputHistory()
    for length in lengths:
        history.observe(length)
    alive = [length for length in lengths if length > num_output]
    went_on = [length for length in alive if length > num_output + steps]
    imagined = PRIOR_WEIGHT * max(0.0, 1 - steps / (max_output - num_output))
    expected = (len(went_on) + imagined) / (len(alive) + PRIOR_WEIGHT)
    if num_output + steps >= max_output:
        expected = 0.0
    assert abs(chance(history, num_output, max_output, steps) - expected) < 1e-12


def test_old_answers_are_forgotten() -> None:
    history = OutputHistory()
    for _ in range(HISTORY):
        history.observe(5)
    assert chance(history, 0, 1000, 100) < 0.01
    for _ in range(HISTORY):
        history.observe(500)
    assert chance(history, 0, 1000, 100) > 0.99


def most_running(max_tokens: int, seen: list[int]) -> int:
    """How many of twenty equal requests are let in together, after answers of these lengths. That
    all end although pages run out: test_memory_pressure."""
    engine = EngineModel(
        limits(num_pages=100, max_running_requests=20, context_length=250, max_prefill_tokens=500)
    )
    for length in seen:
        engine.scheduler.state.outputs.observe(length)
    for i in range(20):
        engine.add([i, 1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
    engine.plan()
    return engine.scheduler.num_running


def test_answers_that_were_short_let_more_in_whatever_their_max_tokens() -> None:
    short, long = most_running(200, [10] * 100), most_running(200, [150] * 100)
    unknown = most_running(200, [])
    assert long <= 3 and long <= unknown < short and short >= 10


def test_a_forecast_brought_up_to_date_is_the_one_made_anew() -> None:
    """Some requests need a forecast and some certainly fit: both must count for those weighed after
    them."""
    rng = np.random.default_rng(0)
    engine = EngineModel(
        limits(num_pages=200, max_running_requests=30, context_length=250, max_prefill_tokens=900)
    )
    admission = engine.scheduler.admission
    for length in rng.integers(1, 60, 50).tolist():
        engine.scheduler.state.outputs.observe(length)
    weigh, answers = admission.has_room_for, []

    def weigh_twice(sequence: Sequence, match: Match | None) -> bool:
        kept = weigh(sequence, match)
        running, candidate = admission._running, admission._candidate
        admission.begin_step()
        assert weigh(sequence, match) == kept
        if candidate is not None:
            assert running is not None and np.allclose(running, admission._running)
        admission._running, admission._candidate = running, candidate
        answers.append((kept, candidate is None))
        return kept

    admission.has_room_for = weigh_twice  # type: ignore[method-assign]
    for i in range(200):
        prompt = [i % 50, i // 50, *([1] * int(rng.integers(1, 30)))]
        engine.add(prompt, max_tokens=int(rng.choice([1, 5, 150])), ignore_eos=True)
    engine.run()
    assert {(True, True), (True, False), (False, False)} <= set(answers)


def test_what_certainly_fits_is_let_in() -> None:
    assert most_running(12, []) == 20  # 20 x 4 pages of 100
