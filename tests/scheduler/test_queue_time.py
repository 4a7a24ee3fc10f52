"""The queue is bounded by time: requests that would wait too long are refused at once. ``make
test-scheduler`` tries a longer bound."""

import os
import time

import numpy as np
import pytest

from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.queue.wait_forecast import MIN_ANSWERS
from radixrt.scheduler.sequence import MAX_IDLE, Groups
from radixrt.scheduler.step_times import StepShape
from tests.scheduler.engine_model import EngineModel, limits
from tests.scheduler.timed_engine import Request, TimedEngine, percentile


def device(shape: StepShape) -> float:
    """About the 0.4 B shape on two cores."""
    return 0.020 + 0.001 * shape.rows + 0.001 * shape.tokens + 1e-7 * shape.pairs


SUSTAINABLE = 5.5
"""Requests a second of :func:`load` that the device can just serve; the first test compares."""


def load(rate: float, seconds: float, max_queue_seconds: float, prompt: int = 100) -> TimedEngine:
    """Requests at random times."""
    engine = TimedEngine(
        device,
        max_step_ms=None,
        max_prefill_tokens=512,
        max_running_requests=32,
        max_queued_requests=4096,
        max_queue_seconds=max_queue_seconds,
    )
    rng = np.random.default_rng(5)
    for arrival_s in np.cumsum(rng.exponential(1 / rate, int(rate * seconds))).tolist():
        output_tokens = int(rng.integers(10, 61))
        engine.add(arrival_s, prompt, output_tokens, max_tokens=500)
    engine.run()
    assert all((r.finished_s is None) == (r.refused is not None) for r in engine.requests)
    return engine


def accepted(engine: TimedEngine) -> list[Request]:
    return [request for request in engine.requests if request.refused is None]


def late_refusals(engine: TimedEngine) -> int:
    """Number of requests that were refused after a wait."""
    return sum(r.refused_s is not None and r.refused_s > r.arrival_s for r in engine.requests)


BOUNDS_S = [5.0] + [30.0] * ("RADIXRT_SCHEDULER_EXAMPLES" in os.environ)


@pytest.mark.parametrize("most_s", BOUNDS_S)
def test_at_ten_times_the_load_an_answer_comes_at_most_the_bound_later(most_s: float) -> None:
    normal = load(SUSTAINABLE, 120, most_s)
    flood = load(10 * SUSTAINABLE, 120, most_s)
    normal_s = [request.latency_s for request in accepted(normal)]
    flood_s = [request.latency_s for request in accepted(flood)]
    assert len(accepted(normal)) >= 0.98 * len(normal.requests), "that load can be served"
    assert percentile(flood_s, 99) <= percentile(normal_s, 99) + most_s
    # The server stays busy, and refuses most of the others at once.
    assert len(flood_s) / max(r.finished_s or 0 for r in flood.requests) > 0.9 * SUSTAINABLE
    refused = len(flood.requests) - len(flood_s)
    assert late_refusals(flood) < 0.1 * refused
    assert all(
        r.refused.status == 503 and 1 <= (r.refused.retry_after_s or 0) <= 60
        for r in flood.requests
        if r.refused is not None
    )


def test_answers_that_become_slower_in_a_flood_count_as_a_wait() -> None:
    """All slots are never taken on this device: prompts fill the steps, and an answer takes twice
    as long beside them."""
    engine = TimedEngine(
        lambda shape: 0.010 + 0.0001 * shape.rows + 0.00015 * shape.tokens,
        max_step_ms=None,
        max_prefill_tokens=512,
        max_running_requests=256,
        max_queued_requests=4096,
        max_queue_seconds=5,
        num_pages=40_000,
    )
    rng = np.random.default_rng(5)
    normal, flood = (
        [engine.add(begin_s + at_s, 128, 64) for at_s in np.cumsum(rng.exponential(1 / rate, count)).tolist()]
        for begin_s, rate, count in ((0, 22, 22 * 20), (25, 220, 220 * 20))
    )  # fmt: skip
    engine.run()
    assert not any(request.refused for request in normal)
    normal_s = [request.latency_s for request in normal]
    flood_s = [request.latency_s for request in flood if request.refused is None]
    assert percentile(flood_s, 99) <= percentile(normal_s, 99) + 5
    assert len(flood_s) > 22 * 20, "and no throughput is lost"


def test_long_prompts_are_counted() -> None:
    flood = load(10, 60, 5.0, prompt=1500)
    learned = [r.ttft_s for r in accepted(flood) if r.arrival_s > 5]
    assert len(learned) > 0.9 * (60 - 15) / 2.2, "the device computes one in 2.2 s, with its answer"
    assert max(learned) < 5 + 3 * 1.6  # besides its wait, its own prompt beside others
    assert max(r.ttft_s for r in accepted(flood)) < 4 * 5 + 3 * 1.6, (
        "at the start without a forecast"
    )
    assert late_refusals(flood) < 0.1 * len(flood.requests)


def test_cached_prefixes_are_not_counted() -> None:
    document = np.arange(3000)
    engine = TimedEngine(
        device,
        max_step_ms=None,
        max_prefill_tokens=512,
        max_running_requests=4,
        max_queue_seconds=8,
    )
    for number in range(20):
        engine.add(0.5 * number, 200, output_tokens=4)
    engine.add(20.0, document, output_tokens=4)
    readers = [
        engine.add(30.0, np.append(document, [1 << 21, number]), output_tokens=4)
        for number in range(16)
    ]
    document = document + 4000
    together = [
        engine.add(45.0, np.append(document, [1 << 21, number]), output_tokens=4)
        for number in range(16)
    ]
    strangers = [engine.add(60.0, 3000, output_tokens=4) for _ in range(16)]
    engine.run()
    assert not any(reader.refused for reader in readers)
    assert not any(reader.refused for reader in together), "they compute it once"
    assert sum(stranger.refused is not None for stranger in strangers) > 8


def test_nothing_is_refused_before_the_costs_are_known() -> None:
    engine = TimedEngine(device, max_running_requests=2, max_queue_seconds=5, num_pages=10_000)
    for _ in range(200):
        engine.add(0.0, 300, output_tokens=30)
    engine.run(until=lambda: engine.clock.now > 1)
    assert not any(request.refused for request in engine.requests)
    engine.run()
    assert late_refusals(engine) > 100, "and the bound holds without a forecast"
    assert max(r.token_s[0] - r.arrival_s for r in accepted(engine)) < 5 + 1.5


def test_an_idle_server_accepts_the_first_request_after_a_flood() -> None:
    engine = load(60, 30, 5.0)
    after = engine.add(engine.clock.now + 1, 2000, output_tokens=10, max_tokens=4000)
    engine.run()
    assert after.refused is None and after.finished_s is not None


def test_a_request_is_refused_if_its_timeout_is_shorter_than_the_wait() -> None:
    engine = load(SUSTAINABLE, 30, 30.0)
    now = engine.clock.now + 1
    for _ in range(40):
        engine.add(now, 100, output_tokens=50, max_tokens=500)
    hurried = engine.add(now, 100, 5, deadline=time.time() + 1.0)
    patient = engine.add(now, 100, 5, deadline=time.time() + 1000.0)
    engine.run()
    assert hurried.refused is not None and hurried.refused_s == hurried.arrival_s
    assert patient.refused is None


def test_answers_that_have_begun_are_never_refused_for_their_wait() -> None:
    now = [0.0]
    engine = EngineModel(limits(max_running_requests=1, max_queue_seconds=5), clock=lambda: now[0])
    running = engine.add([1, 2, 3], max_tokens=50, ignore_eos=True)
    engine.plan()
    resumed = engine.add([4, 5, 6], max_tokens=5, num_output=1, ignore_eos=True)
    new = engine.add([7, 8, 9], max_tokens=5, ignore_eos=True)
    assert engine.scheduler.open.queue_time.seconds_to_next_overdue() == 5
    now[0] = 6.0
    assert [refused.seq_id for refused in engine.scheduler.refuse_overdue()] == [new]
    assert engine.scheduler.open.queue_time.seconds_to_next_overdue() is None
    engine._end(new, "refused")
    engine.run()
    assert engine.finished[running] == engine.finished[resumed] == "length"
    assert engine.scheduler.state.counters.refused == 1


# ------------------------------------------------------------ batches


def test_a_batch_is_accepted_or_refused_as_a_whole() -> None:
    """Batches of 8 prompts at ten times the rate; their prompts are encoded by turns, and arrive
    one after the other."""
    engine = TimedEngine(device, max_prefill_tokens=512, max_running_requests=32, max_queue_seconds=5)  # fmt: skip
    rng, batches = np.random.default_rng(5), []
    for number, arrival_s in enumerate(np.cumsum(rng.exponential(8 / 55, 400)).tolist()):
        batches.append(
            [
                engine.add(arrival_s + 0.3 * place, 100, int(rng.integers(10, 61)), 500, f"{number}", 8)
                for place in range(8)
            ]
        )  # fmt: skip
    engine.run()
    refused = [batch for batch in batches if batch[0].refused is not None]
    finished = [batch for batch in batches if batch not in refused]
    assert len(refused) > 300 and len(finished) > 0.8 * SUSTAINABLE * 58 / 8
    assert all(request.finished_s is not None for batch in finished for request in batch)
    assert not any(request.token_s for batch in refused for request in batch), "none has begun"
    waits_s = [batch[0].ttft_s for batch in finished if batch[0].arrival_s > 15]
    assert max(waits_s) < 1.25 * 5
    assert engine.scheduler.open.waits.corrected(1.0) < 2, (
        "prompts that are still to come are counted"
    )
    groups = engine.scheduler.open.groups
    assert groups.num_to_come == groups.output_to_come == 0


def test_the_next_prompts_of_a_long_batch_are_never_refused() -> None:
    engine = TimedEngine(device, max_running_requests=4, max_queued_requests=60, max_queue_seconds=5)  # fmt: skip
    first = [engine.add(0.0, 100, 30, 500, "batch", 2) for _ in range(2)]
    for number in range(600):
        engine.add(0.5 + 0.05 * number, 100, 30, 500)
    later = [engine.add(5.0 + place, 100, 30, 500, "batch", 2) for place in range(20)]
    engine.run()
    assert sum(request.refused is not None for request in engine.requests) > 400
    assert all(request.finished_s is not None for request in first + later)


def test_a_batch_of_which_nothing_has_begun_is_refused_after_the_wait() -> None:
    engine = TimedEngine(device, max_running_requests=2, max_queue_seconds=5, num_pages=10_000)
    engine.add(0.0, 100, 1000)
    begun = [engine.add(0.1, 100, 300, None, "begun", 3) for _ in range(3)]
    waiting = [engine.add(0.2 + 3 * place, 100, 300, None, "waiting", 2) for place in range(2)]
    engine.run()
    assert max(request.ttft_s for request in begun) > 2 * 5
    assert all(request.finished_s is not None for request in begun)
    assert all(5.2 <= (request.refused_s or 0) < 6 for request in waiting)
    assert engine.scheduler.state.counters.refused == 2


def test_batches_of_which_nothing_is_left_are_forgotten_one_day() -> None:
    def of(name: str) -> SequenceRequest:
        return SequenceRequest(
            seq_id=0, token_ids=b"", options=RequestOptions(), group=name, group_size=2
        )

    groups = Groups()
    runs = groups.join(of("runs"))
    for number in range(2 * MAX_IDLE):
        groups.leave(groups.join(of(f"{number}")))
        if number == MAX_IDLE:
            groups.join(of("7"))
    known = [number for number in range(2 * MAX_IDLE) if groups.knows(of(f"{number}"))]
    assert known == [7, *range(MAX_IDLE, 2 * MAX_IDLE)] and groups.knows(of("runs"))
    groups.leave(runs)
    assert not groups.knows(of(f"{MAX_IDLE}")) and groups.knows(of("runs"))


def test_zero_is_no_bound() -> None:
    engine = TimedEngine(device, max_running_requests=2, max_queue_seconds=0, num_pages=10_000)
    for number in range(100 + MIN_ANSWERS):
        engine.add(0.1 * number, 300, output_tokens=30)
    engine.run()
    assert len(accepted(engine)) == len(engine.requests)
    assert engine.scheduler.open.queue_time.seconds_to_next_overdue() is None
