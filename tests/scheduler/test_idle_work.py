"""Prompts that are computed ahead: only while nothing else waits or runs, and never in the way."""

import random

import pytest
from msgspec.structs import replace

from radixrt.messages.requests import IdleKind
from radixrt.scheduler.idle_work import QUIET_S
from tests.scheduler.engine_model import EngineModel, limits

LONG = [i * 7 % 43 for i in range(200)]


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def idle_model(share: float = 1.0, **changes: object) -> tuple[EngineModel, Clock]:
    clock = Clock()
    return EngineModel(limits(idle_share=share, **changes), clock), clock


def finish(model: EngineModel, clock: Clock) -> None:
    """Until everything has finished; the clock goes on where idle work rests."""
    while True:
        while len(model.sent) < 2 and model.plan() is not None:
            pass
        if model.sent:
            model.absorb()
        elif (rest := model.scheduler.state.idle.seconds_to_rest()) is not None:
            clock.now += rest
        else:
            break
    model.run()


def test_an_idle_prompt_is_in_the_tree_afterwards_and_counts_apart() -> None:
    model, _ = idle_model()
    idle = model.add(LONG, max_tokens=0, idle="expected")
    model.run()
    counters = model.scheduler.state.counters
    assert counters.idle_tokens == len(LONG)
    assert counters.prompt_tokens == counters.cached_tokens == counters.cache_write_tokens == 0
    assert model.finished[idle] == "length"
    answered = model.add([*LONG, 1, 2], max_tokens=3)
    model.run()
    assert model.cached[answered] == 200
    assert counters.prompt_tokens == 202


def test_a_request_waits_for_one_idle_step_and_the_idle_work_goes_on_behind_it() -> None:
    model, clock = idle_model()
    idle = model.add(LONG, max_tokens=0, idle="expected")
    model.plan()
    model.absorb()
    model.plan()
    assert model.plan() is None, "one idle step at a time"
    real = model.add([5] * 9, max_tokens=4)
    plan = model.plan()
    assert plan is not None
    assert len(plan.admit) == 1 and len(plan.prefill) == 1, "the request alone"
    while real not in model.finished:
        while len(model.sent) < 2 and (plan := model.plan()) is not None:
            assert idle not in [one.seq_id for one in model.scheduler.state.slots.running()]
        model.absorb()
    assert idle not in model.finished
    finish(model, clock)
    assert model.finished[idle] == "length"
    assert model.scheduler.state.counters.idle_tokens <= len(LONG) + 64  # the step that was dropped


@pytest.mark.parametrize("kind", ["expected", "arriving"])
def test_no_idle_step_begins_while_the_last_tokens_of_an_answer_are_on_their_way(
    kind: IdleKind,
) -> None:
    model, clock = idle_model()
    idle = model.scheduler.state.idle
    real = model.add([5] * 9, max_tokens=4)
    model.add(LONG, max_tokens=0, idle=kind)
    while real not in model.finished:
        while len(model.sent) < 2 and model.plan() is not None:
            pass
        model.absorb()
    assert not model.sent and model.plan() is None
    assert idle.seconds_to_rest() == QUIET_S
    clock.now = QUIET_S / 2
    assert model.plan() is None
    clock.now = QUIET_S
    assert idle.seconds_to_rest() is None
    finish(model, clock)
    assert model.scheduler.state.counters.idle_tokens == len(LONG)


def test_idle_steps_take_no_more_than_their_share() -> None:
    model, clock = idle_model(share=0.25)
    model.add(LONG, max_tokens=0, idle="expected")
    model.plan()
    result = model.worker.step(model.sent.popleft())
    result = replace(result, step_s=2.0)
    model._take(model.scheduler.absorb(result))
    assert model.plan() is None
    assert model.scheduler.state.idle.seconds_to_rest() == 6.0
    clock.now = 6.0
    assert model.plan() is not None
    while model.sent or model.plan() is not None:
        model.absorb()
        clock.now += 100.0
    assert model.finished


def test_prompts_that_arrive_come_first_and_never_rest() -> None:
    model, clock = idle_model(share=0.25)
    expected = model.add(LONG, max_tokens=0, idle="expected")
    model.plan()
    result = replace(model.worker.step(model.sent.popleft()), step_s=2.0)
    model._take(model.scheduler.absorb(result))
    assert model.plan() is None and model.scheduler.state.idle.seconds_to_rest() == 6.0
    arriving = model.add([5] * 150, max_tokens=0, idle="arriving")
    while arriving not in model.finished:
        assert model.plan() is not None, "it does not rest"
        model.absorb()
    assert expected not in model.finished and model.plan() is None
    rest = model.scheduler.state.idle.seconds_to_rest()
    assert rest is not None and rest > 0
    while expected not in model.finished:
        clock.now += 100.0
        assert model.plan() is not None
        model.absorb()


def test_an_idle_step_is_short_before_any_time_is_known() -> None:
    most = {"max_prefill_tokens": 4096, "chunked_prefill_size": 4096, "context_length": 2048}
    model, _ = idle_model(**most, num_pages=600, max_step_ms=None)
    model.add([i % 43 for i in range(2000)], max_tokens=0, idle="expected")
    plan = model.plan()
    assert plan is not None and plan.prefill[0].num_tokens <= 64
    model.run()


def test_no_share_no_idle_work() -> None:
    model, _ = idle_model(share=0.0)
    refused = model.scheduler.add(_request(model))
    assert refused is not None and "--idle-share" in refused.message


def _request(model: EngineModel):
    other, _ = idle_model()
    return other.requests[other.add(LONG, max_tokens=0, idle="expected")]


def test_a_client_may_take_its_idle_prompt_back_at_any_time() -> None:
    for steps in range(3):
        model, _ = idle_model()
        first = model.add(LONG, max_tokens=0, idle="expected")
        second = model.add([3] * 90, max_tokens=0, idle="expected")
        for _ in range(steps):
            model.plan()
            model.absorb()
        model.release(first)
        model.run()
        assert model.finished[second] == "length"
        assert model.scheduler.state.idle.running is None


def test_random_requests_beside_idle_work() -> None:
    for seed in range(4):
        rng = random.Random(seed)
        model, clock = idle_model(num_pages=64)
        state, real = model.scheduler.state, set()
        for _ in range(120):
            if rng.random() < 0.2:
                size = rng.randrange(1, 150)
                model.add(LONG[:size], max_tokens=0, idle="expected")
            if rng.random() < 0.2:
                answer = {"max_tokens": rng.randrange(1, 9)}
                real.add(model.add(LONG[: rng.randrange(1, 60)], **answer))
            if (plan := model.plan()) is not None:
                in_flight = [step.is_idle for step in state.in_flight._steps]
                assert in_flight.count(True) <= 1
                assert not in_flight[-1] or real <= model.finished.keys()
                decoding = state.slots.is_decoding.nonzero()[0].tolist()
                rows = {*decoding, *(chunk.slot for chunk in plan.prefill)}
                computed = [one.is_idle for one in state.slots.running() if one.slot in rows]
                assert computed == [in_flight[-1]] * len(computed)
            if model.sent and (len(model.sent) == 2 or rng.random() < 0.5):
                model.absorb()
            clock.now += QUIET_S * rng.random()
        finish(model, clock)
        assert model.scheduler.state.counters.idle_tokens > 0
