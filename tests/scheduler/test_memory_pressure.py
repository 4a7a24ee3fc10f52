"""A pool of 1.2 times one request's need, hundreds of requests, and clients that go away: everybody
else is answered. ``make test-scheduler`` has twice as many, and admits carefully and recklessly
under each policy."""

import os
import random

import pytest

from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.queue.admission import Admission
from radixrt.scheduler.sequence import Sequence
from tests.scheduler.engine_model import EngineModel, limits

CONTEXT = 100
DOCUMENTS = [[(i * step) % 41 for i in range(45)] for step in (3, 5, 7)]
IN_FULL = "RADIXRT_SCHEDULER_EXAMPLES" in os.environ
REQUESTS = 250 if IN_FULL else 120


def small_engine(policy: SchedulePolicyName, *, reckless: bool) -> EngineModel:
    """30 pages of 4 tokens; the longest request needs 25."""
    return EngineModel(
        limits(num_pages=30, context_length=CONTEXT, schedule_policy=policy), reckless=reckless
    )


def prompt_of_some_kind(engine: EngineModel, rng: random.Random) -> tuple[list[int], str]:
    """Something new, a question about a document, or a fork of an earlier request; and its salt."""
    kind = rng.randrange(4)
    tail = [rng.randrange(45) for _ in range(rng.randint(1, 12))]
    if kind == 0 or not engine.requests:
        return tail * rng.randint(1, 5), ""
    if kind == 1:
        return rng.choice(DOCUMENTS) + tail, rng.choice(["", "", "tenant"])
    seq_id = rng.randrange(len(engine.requests))
    request = engine.requests[seq_id]
    known = unpack_ids(request.token_ids).tolist() + engine.answers[seq_id]
    return known[: rng.randint(1, CONTEXT - 20)] + tail, request.options.root.salt


def arrive(engine: EngineModel, rng: random.Random) -> None:
    prompt, salt = prompt_of_some_kind(engine, rng)
    room = CONTEXT - len(prompt)
    engine.add(
        prompt,
        rng.randint(1, room) if rng.random() < 0.3 else min(room, rng.randint(1, 12)),
        salt,
        ignore_eos=rng.random() < 0.5,
        priority=rng.randint(-1, 1),
        grammar=b"json" if rng.random() < 0.1 else None,
    )


def step(engine: EngineModel) -> None:
    engine.load_grammar()
    while len(engine.sent) < 2 and engine.plan() is not None:
        pass
    if engine.sent:
        engine.absorb()
        check_invariants(engine.scheduler)


CASES = [("lpm", True), ("suf", False), ("fcfs", False), ("priority", True)]
if IN_FULL:
    CASES += [(policy, not reckless) for policy, reckless in CASES]


@pytest.mark.parametrize(("policy", "reckless"), CASES)
def test_hundreds_of_requests_in_a_pool_for_hardly_more_than_one_are_answered_as_if_alone(
    policy: SchedulePolicyName, reckless: bool
) -> None:
    rng = random.Random(7)
    engine = small_engine(policy, reckless=reckless)
    for _ in range(REQUESTS):
        arrive(engine, rng)
        for _ in range(rng.choice((0, 0, 1, 4))):
            step(engine)
        unfinished = [seq_id for seq_id in engine.requests if seq_id not in engine.finished]
        if unfinished and rng.random() < 0.1:
            engine.release(rng.choice(unfinished))
    engine.run()  # compares the answers that end with those of an undisturbed model
    reasons = set(engine.finished.values())
    assert reasons == {"stop", "length", "released"}
    for seq_id, answer in engine.answers.items():
        assert answer == engine.expected(seq_id)[: len(answer)]
    scheduler = engine.scheduler
    assert (
        scheduler.state.kv.evicted_pages > 0
        and (scheduler.state.counters.retractions > REQUESTS / 5) == reckless
    )
    scheduler.flush_cache()
    assert scheduler.state.kv.allocator.num_free == scheduler.state.limits.num_pages


@pytest.mark.parametrize("policy", ["lpm", "priority"] + IN_FULL * ["suf", "fcfs"])
def test_who_was_retracted_goes_before_everybody_of_its_rank_who_was_never_picked(
    policy: SchedulePolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work would not go on for sure otherwise; see radixrt/scheduler/queue/waiting_queue.py."""
    engine, rng = small_engine(policy, reckless=True), random.Random(3)
    waiting = engine.scheduler.state.waiting
    rank, pop, contested = waiting.order.rank, waiting.pop, 0

    def watch(picked: Sequence) -> None:
        nonlocal contested
        others = list(waiting._waiting.values())
        if waiting._waiting[picked.seq_id].retracted:
            contested += any(not other.retracted for other in others)
        else:
            assert all(rank(picked) < rank(o.sequence) for o in others if o.retracted)
        pop(picked)

    monkeypatch.setattr(waiting, "pop", watch)
    for _ in range(150):
        arrive(engine, rng)
        for _ in range(rng.choice((0, 1, 4))):
            step(engine)
    engine.run()
    assert contested > 20


def test_two_that_fill_the_pool_alone_do_not_retract_each_other_for_ever() -> None:
    """The smallest case in which both must give way: two answers as long as the pool, token by
    token."""
    for page_size in (1, 2):
        engine = EngineModel(
            limits(num_pages=12 // page_size, page_size=page_size, context_length=12), reckless=True
        )
        for first in (1, 2, 3):
            engine.add([first], max_tokens=11, ignore_eos=True)
        engine.run(max_steps=200)
        assert 0 < engine.scheduler.state.counters.retractions < 50


def test_an_admission_that_forgets_the_pages_for_prompts_is_found_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts that share the last pages would be retracted and admitted in turn, within one
    plan."""
    monkeypatch.setattr(Admission, "has_room_for", lambda *_: True)
    engine = EngineModel(limits(num_pages=10, chunked_prefill_size=16, context_length=40))
    for first in (1, 2, 3):
        engine.add([first] * 36, max_tokens=4)
    with pytest.raises(AssertionError, match="without a page for its prompt"):
        engine.run()
