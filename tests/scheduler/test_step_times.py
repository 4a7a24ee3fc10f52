"""A step has a time: prefill chunks are sized by step times learned online, and prompts share the
step."""

import itertools

import msgspec
import numpy as np
import pytest

from radixrt.messages.steps import StepPlan, StepResult
from radixrt.scheduler.process import replica_load
from radixrt.scheduler.step_times import (
    MAX_MS,
    MIN_MS,
    NO_BOUND,
    RecentRatio,
    StepShape,
    StepTimes,
    attended_pairs,
)
from tests.scheduler.engine_model import EngineModel, limits
from tests.scheduler.timed_engine import Request, TimedEngine, percentile

LONG, SHORT = 7000, 60
ONE_ANSWER = StepShape(1, 0)


class Device:
    """The true costs in seconds, about those of the 0.4 B shape on two cores. Times have noise of a
    tenth; of fifty steps, one takes ``pause`` times as long."""

    def __init__(self, slower: float = 1.0, pause: float = 1.0) -> None:
        self.costs = 0.020 * slower, 0.001 * slower, 0.001 * slower, 1e-7 * slower
        self._pause = pause
        self._rng = np.random.default_rng(1)

    def exact(self, shape: StepShape) -> float:
        constant, row, token, pair = self.costs
        return constant + row * shape.rows + token * shape.tokens + pair * shape.pairs

    def __call__(self, shape: StepShape) -> float:
        pause = self._pause if self._rng.random() < 0.02 else 1
        return self.exact(shape) * float(self._rng.uniform(0.95, 1.05)) * pause


def random_shapes(seed: int, count: int) -> list[StepShape]:
    rng = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        shape = StepShape(rows=int(rng.integers(1, 33)), context=0)
        if rng.random() < 0.7:
            shape = shape.with_chunk(int(rng.integers(0, 6000)), int(rng.integers(16, 256)))
        shapes.append(shape)
    return shapes


def test_forecasts_are_within_a_fifth_in_spite_of_noise_and_pauses() -> None:
    truth, times = Device(pause=20), StepTimes(None)
    for shape in random_shapes(0, 400):
        times.observe(shape, truth(shape))
    for shape in random_shapes(2, 100):
        assert times.seconds(shape) == pytest.approx(truth.exact(shape), rel=0.2)


def test_the_first_decode_steps_of_a_server_are_all_learned_from() -> None:
    """Most have drafts and do not count. Prompts alone say little about the part of a step that is
    always the same."""
    errors = []
    for seed in range(8):
        rng, times = np.random.default_rng(seed), StepTimes(None)
        for tokens in (64, 64, 128, 256, 256, 256):
            seconds = 0.020 + 0.001 * tokens
            times.observe(StepShape(0, 0, tokens), seconds * float(rng.uniform(0.95, 1.05)))
        for drafted in (0, 4, 2, 0, 6, 3, 0):
            seconds = (0.021 + 0.001 * drafted) * float(rng.uniform(0.95, 1.05))
            shape = StepShape(rows=1 + drafted, context=0)
            times.observe(shape, seconds, has_drafts=drafted > 0)
        errors.append(times.seconds(StepShape(rows=1, context=0)) / 0.021)
    assert min(errors) > 0.9 and max(errors) < 1.1, errors


def test_a_lasting_change_of_speed_is_learned() -> None:
    times = StepTimes(None)
    for truth in (Device(), Device(slower=3)):
        for shape in random_shapes(0, 200):
            times.observe(shape, truth.exact(shape))
    for shape in random_shapes(2, 50):
        assert times.seconds(shape) == pytest.approx(truth.exact(shape), rel=0.1)


def test_ten_thousand_equal_decode_steps_do_not_make_it_forget_prompts() -> None:
    truth, times = Device(pause=20), StepTimes(None)
    for shape in random_shapes(0, 300):
        times.observe(shape, truth(shape))
    for _ in range(10_000):
        times.observe(StepShape(8, 0), truth(StepShape(8, 0)))
    long_step = StepShape(8, 0).with_chunk(3000, 128)
    assert times.seconds(long_step) == pytest.approx(truth.exact(long_step), rel=0.25)


def test_steps_with_drafts_do_not_shorten_the_step_of_one_answer() -> None:
    """Up to 16 rows wait for memory, for 22 to 27 ms; more compute, for 1 ms each."""
    times = StepTimes(None)
    for number in range(400):
        drafted = number % 8 != 0
        rows = 16 + number % 40 if drafted else 1 + number % 16
        seconds = max(0.0217 + rows * 0.0003, rows * 0.001)
        times.observe(StepShape(rows, 0), seconds, has_drafts=drafted)
        times.observe(StepShape(rows, 0).with_chunk(0, 64), seconds + 0.064, has_drafts=drafted)
    assert times.max_step_s(ONE_ANSWER) == pytest.approx(5 * 0.022, rel=0.1)


def roofline(rng: np.random.Generator, shape: StepShape) -> float:
    """As on a CPU: a step reads all weights in 20 ms, and computes meanwhile. Times have noise of a
    tenth; of fifty steps, one takes three times as long."""
    pause = 3 if rng.random() < 0.02 else 1
    computed_s = 0.00085 * (shape.rows + shape.tokens)
    return (max(0.0165, computed_s) + 0.0035) * float(rng.uniform(0.95, 1.05)) * pause


def tokens_of_steps(seed: int, rows: tuple[int, int]) -> list[int]:
    """Prompt tokens of 200 steps beside some answers, each planned by the times of those before; at
    first, one answer alone, with drafts, as after the first request of a server."""
    rng, times = np.random.default_rng(seed), StepTimes(None)

    def take(shape: StepShape, *, has_drafts: bool = False) -> None:
        times.observe(shape, roofline(rng, shape), has_drafts=has_drafts)

    for tokens in (64, 128, 128, 32):
        take(StepShape(0, 0, tokens))
    for drafted in (3, 6, 1, 4):
        take(StepShape(1 + drafted, 0), has_drafts=True)
    planned = []
    for _ in range(200):
        decode = StepShape(int(rng.integers(*rows)), 0)
        most = times.tokens_within(times.prefill_seconds(decode), 0)
        planned.append(max(16, min(most, times.most_prefill_tokens(), 512) // 16 * 16))
        take(decode.with_chunk(0, planned[-1]))
    return planned


@pytest.mark.parametrize("rows", [(0, 1), (6, 17)])
def test_steps_with_prompts_are_as_large_in_every_run(rows: tuple[int, int]) -> None:
    """They are as long as their bound, so a bound that is learned from them alone drifts, or
    shrinks with them."""
    runs = [tokens_of_steps(seed, rows) for seed in range(8)]
    means = [np.mean(planned[20:]) for planned in runs]
    assert min(means) > 80 and max(means) < 1.25 * min(means), means


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_the_time_of_one_answer_is_known_after_a_slow_first_step_and_after_a_change(
    slower: float,
) -> None:
    rng, times, one = np.random.default_rng(0), StepTimes(None), StepShape(1, 500)
    for _ in range(4):
        times.observe(one, 0.020 * 3)
    for _ in range(12):
        times.observe(one, roofline(rng, one))
    assert times.max_step_s(one) == pytest.approx(5 * 0.020, rel=0.15)
    for _ in range(200):
        times.observe(one, slower * roofline(rng, one))
    expected_ms = min(5 * 20 * slower, MAX_MS)
    assert 1000 * times.max_step_s(one) == pytest.approx(expected_ms, rel=0.1)


def test_steps_that_only_sample_held_tokens_are_not_taken_for_steps_of_an_answer() -> None:
    model = EngineModel(limits(max_step_ms=None))
    step, only_sampled = model.worker.step, 0

    def timed(plan: StepPlan) -> StepResult:
        nonlocal only_sampled
        before = model.worker.computed_tokens
        result = step(plan)
        computes = model.worker.computed_tokens > before
        only_sampled += not computes
        return msgspec.structs.replace(result, step_s=0.020 if computes else 0.0001)

    model.worker.step = timed  # type: ignore[method-assign]
    for number in range(20):
        model.add([number, 2, 3], max_tokens=12, grammar=b"held")
        model.run()
    assert only_sampled > 10
    assert model.scheduler.state.times.max_step_s(ONE_ANSWER) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("start", [0, 100, 6000])
def test_tokens_within_a_time_take_that_time(start: int) -> None:
    truth, times = Device(), StepTimes(None)
    for shape in random_shapes(0, 200):
        times.observe(shape, truth.exact(shape))
    tokens = times.tokens_within(0.2, start)
    assert times.chunk_seconds(start, tokens) <= 0.2001
    assert times.chunk_seconds(start, tokens + 2) > 0.2
    assert attended_pairs(start, 1) == start


def test_bound_of_a_step() -> None:
    truth = Device()
    bounds = {}
    for max_step_ms in (None, 0.0, 40.0):
        times = StepTimes(max_step_ms)
        for shape in random_shapes(0, 200):
            times.observe(shape, truth.exact(shape))
        bounds[max_step_ms] = times
    assert bounds[None].max_step_s(ONE_ANSWER) == pytest.approx(5 * 0.021, rel=0.05)
    assert bounds[None].max_step_s(StepShape(0, 0)) == bounds[None].max_step_s(ONE_ANSWER)
    assert bounds[None].max_step_s(StepShape(16, 0)) == pytest.approx(4 * 0.021 + 0.036, rel=0.05)
    assert bounds[None].max_step_s(StepShape(100, 0)) == MAX_MS / 1000
    assert bounds[40.0].max_step_s(ONE_ANSWER) == 0.04
    assert bounds[0.0].tokens_within(bounds[0.0].prefill_seconds(StepShape(1, 0)), 0) > 1 << 24
    assert bounds[0.0].most_prefill_tokens() == NO_BOUND
    assert StepTimes(None).max_step_s(ONE_ANSWER) == MIN_MS / 1000
    crowded = StepShape(120, 0)
    assert bounds[40.0].prefill_seconds(crowded) == pytest.approx(0.14 / 3, rel=0.05)


def serve_beside_long_prompts(num_long: int, max_step_ms: float | None) -> TimedEngine:
    """Short prompts every 0.4 s, after ``num_long`` long prompts that come together."""
    engine = TimedEngine(
        Device(),
        max_step_ms=max_step_ms,
        max_prefill_tokens=512,
        chunked_prefill_size=2048,
        max_running_requests=64,
        num_pages=10_000,
    )
    for number in range(20):
        engine.add(0.4 * number, SHORT, output_tokens=10)
    for _ in range(num_long):
        engine.add(8.0, LONG, output_tokens=5)
    for number in range(50):
        engine.add(8.1 + 0.4 * number, SHORT, output_tokens=10)
    engine.run()
    return engine


def after_long(engine: TimedEngine) -> list[Request]:
    return [r for r in engine.requests[20:] if r.output_tokens == 10]


@pytest.mark.parametrize("num_long", [1, 4, 16])
def test_short_prompts_wait_for_two_steps_beside_long_ones(num_long: int) -> None:
    engine = serve_beside_long_prompts(num_long, None)
    ttft = [request.ttft_s for request in after_long(engine)]
    bound = engine.scheduler.state.times.max_step_s(ONE_ANSWER)
    # The step that runs, the step that is planned already, and its own; and the noise of these.
    assert percentile(ttft, 90) < 1.25 * 3 * bound
    by_tokens = [r.ttft_s for r in after_long(serve_beside_long_prompts(num_long, 0))]
    assert percentile(by_tokens, 90) > 2 * percentile(ttft, 90)


def test_running_answers_get_a_token_within_the_bound_beside_prefill() -> None:
    gaps = {}
    for max_step_ms in (None, 0):
        engine = serve_beside_long_prompts(4, max_step_ms)
        tokens = [request.token_s for request in after_long(engine)]
        gaps[max_step_ms] = [b - a for seen in tokens for a, b in itertools.pairwise(seen)]
    assert percentile(gaps[None], 95) < 0.150
    assert percentile(gaps[0], 95) > 0.500


def test_long_prompts_end_at_most_a_third_later_than_without_a_bound() -> None:
    ends = {}
    for max_step_ms in (None, 0):
        engine = serve_beside_long_prompts(4, max_step_ms)
        ends[max_step_ms] = max(r.latency_s for r in engine.requests if r.output_tokens == 5)
    assert ends[None] < 1.33 * ends[0]


def test_a_long_prompt_ends_under_an_endless_stream_of_shorter_ones() -> None:
    engine = TimedEngine(
        Device(), max_step_ms=None, max_prefill_tokens=512, max_running_requests=256
    )
    long = engine.add(1.0, 4000, output_tokens=1)
    # More than a step can compute: 1.2 s of prompts in a second.
    for number in range(800):
        engine.add(0.05 * number, SHORT, output_tokens=1)
    engine.run(until=lambda: bool(long.token_s))
    # It gets a quarter of the time: 4 s of prompts, and 0.8 s for pairs of tokens.
    assert long.ttft_s < 4 * 4.8 * 1.4
    assert engine.clock.now < 0.05 * 800, "shorter ones were still coming"


def test_sixteen_readers_of_one_new_document_compute_it_once_in_short_steps() -> None:
    document = np.arange(3000)
    engine = TimedEngine(Device(), max_step_ms=None, max_prefill_tokens=512, num_pages=8000)
    for reader in range(16):
        engine.add(0.001 * reader, np.append(document, [1 << 21, reader]), output_tokens=3)
    engine.run(check=True)
    computed = sum(shape.tokens for shape, _ in engine.steps)
    assert (
        computed <= len(document) + 16 * 2 * 16
    )  # each its question and the page in which it begins


def test_chunks_end_with_pages() -> None:
    engine = TimedEngine(Device(), max_step_ms=60, max_prefill_tokens=512)
    plans = []
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda: plans.append(plan()) or plans[-1]  # type: ignore[method-assign]
    lengths = [1000, 333, 47, 2000]
    for length in lengths:
        engine.add(0.0, length, output_tokens=2)
    engine.run(check=True)
    ends = [chunk.start + chunk.num_tokens for p in plans if p for chunk in p.prefill]
    assert all(end % 16 == 0 or end in lengths for end in ends) and len(ends) > 20


def test_the_load_for_a_router_tells_the_rest_of_a_partly_computed_prompt() -> None:
    engine = TimedEngine(
        lambda shape: 0.020 + 0.001 * shape.rows + 0.001 * shape.tokens,
        max_step_ms=0,
        max_prefill_tokens=512,
    )
    for second in range(20):
        engine.add(float(second), 300 + 10 * second, 10)
    engine.add(30.0, LONG, 2)
    engine.run(until=lambda: engine.clock.now > 32)
    load = replica_load(engine.scheduler, 21)
    rest = LONG - int(engine.scheduler.state.slots.planned.max())
    # An early fit may have given all time to the step itself, and none to its prompts.
    engine.scheduler.state.times._prefill_s = RecentRatio()
    engine.scheduler.state.times._prefill_s.observe(1e-9, 1)
    assert replica_load(engine.scheduler, 21).slowdown == pytest.approx(load.slowdown, rel=0.5)
    assert load.partial_s == [pytest.approx(0.001 * rest, rel=0.1)]
    assert load.waiting_s == 0 and load.queued_s == load.step_s + load.partial_s[0]


def test_log_probabilities_of_a_prompt_keep_to_the_bound_of_a_step() -> None:
    """Each takes the time of five prompt tokens, and none came before: of a large vocabulary, they
    are most of the work."""
    settings = limits(
        max_step_ms=100.0,
        max_prefill_tokens=512,
        chunked_prefill_size=512,
        context_length=4096,
        num_pages=4000,
        max_running_requests=8,
    )
    model = EngineModel(settings)
    step, scoring = model.worker.step, set[int]()
    seconds: list[float] = []

    def timed(plan: StepPlan) -> StepResult:
        scoring.difference_update(plan.release)
        scoring.update(a.slot for a in plan.admit if a.sampling.prompt_logprobs is not None)
        result = step(plan)
        tokens = sum(chunk.num_tokens for chunk in plan.prefill)
        scored = sum(chunk.num_tokens for chunk in plan.prefill if chunk.slot in scoring)
        step_s = 0.010 + 0.0002 * tokens + 0.001 * scored
        seconds.append(step_s)
        return msgspec.structs.replace(result, step_s=step_s)

    model.worker.step = timed  # type: ignore[method-assign]
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return rng.integers(0, 40, length).tolist()

    for length in (40, 300, 900, 2000, 3000):
        model.add(prompt(length), max_tokens=4)
        model.run()
    seconds.clear()
    model.add(prompt(8), max_tokens=200, ignore_eos=True)
    model.add(prompt(3000), max_tokens=2, prompt_logprobs=20)
    model.run()
    assert max(seconds) < 0.15, "two of the first steps were planned before the cost was known"
    assert len([one for one in seconds if one > 0.07]) > 20, "steps are filled"
    seconds.clear()
    end = model.add(prompt(3000), max_tokens=2, prompt_logprobs=0, prompt_logprobs_start=2990)
    model.run()
    assert end is not None and len(seconds) < 20, "tokens without log-probabilities cost no more"
