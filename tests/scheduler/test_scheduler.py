"""What the scheduler promises, one test a promise."""

import gc
import time

import msgspec
import numpy as np
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import DEFAULT_POOLING, PoolingInfo, RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.steps import MAX_DRAFTED, NO_TOKEN
from radixrt.scheduler.invariants import InvariantError, check_invariants
from radixrt.scheduler.queue.waiting_queue import QueueOrder, choose_victim
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import DRAFT_HEADROOM, SlotTable
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars
from tests.batches import finished, started
from tests.scheduler.engine_model import EOS, EngineModel, limits

DOCUMENT = [i * 7 % 43 for i in range(200)]


def request(seq_id: int, prompt: list[int], **sampling: object) -> SequenceRequest:
    params = SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
    return SequenceRequest(
        seq_id=seq_id, token_ids=pack_ids(prompt), options=RequestOptions(sampling=params)
    )


@pytest.mark.parametrize("chunk", [16, 32, 500])
@pytest.mark.parametrize("budget", [32, 64, 1000])
def test_thirty_two_questions_on_one_new_document_prefill_it_once(chunk: int, budget: int) -> None:
    engine = EngineModel(
        limits(
            num_pages=1000,
            max_running_requests=32,
            chunked_prefill_size=chunk,
            max_prefill_tokens=budget,
        )
    )
    for question in range(32):
        engine.add(DOCUMENT + [100 + question] * 4, max_tokens=1)
    engine.run()
    questions = 32 * 4
    # each recomputes at most the page its question begins in
    assert engine.worker.computed_tokens <= len(DOCUMENT) + questions + 32 * 4
    assert sum(engine.cached.values()) >= 31 * (len(DOCUMENT) - 4)


def test_prompts_of_an_encoder_are_computed_whole_and_none_is_cached() -> None:
    encoder = PoolingInfo(task="embed", size=2, whole_prompts=True)
    engine = EngineModel(limits(pooling=encoder, max_prefill_tokens=40, chunked_prefill_size=16))
    lengths = [39, 1, 60, 60, 5, 5, 30]
    for length in lengths:
        engine.add(DOCUMENT[:length], max_tokens=0, pool=DEFAULT_POOLING)
    engine.run()
    chunks = [chunk for plan in engine.plans for chunk in plan.prefill]
    assert sorted(chunk.num_tokens for chunk in chunks) == sorted(lengths)
    assert {chunk.start for chunk in chunks} == {0} and set(engine.cached.values()) == {0}
    steps = [sum(chunk.num_tokens for chunk in plan.prefill) for plan in engine.plans]
    assert max(steps) == 60 and len([tokens for tokens in steps if tokens]) < len(lengths)


def test_next_turn_of_a_chat_finds_the_answer_of_the_turn_before() -> None:
    engine = EngineModel(limits())
    first = engine.add(list(range(20)), max_tokens=13, ignore_eos=True)
    engine.run()
    history = list(range(20)) + engine.answers[first]
    second = engine.add([*history, 40, 41], max_tokens=2)
    engine.run()
    assert engine.cached[second] == (len(history) - 1) // 4 * 4


def test_a_decode_step_in_which_nothing_changes_is_a_few_bytes() -> None:
    engine = EngineModel(
        limits(num_pages=10_000, max_running_requests=256, page_size=16, max_prefill_tokens=10_000)
    )
    for i in range(256):
        engine.add([i % 43, i // 43, 5], max_tokens=50, ignore_eos=True)
    plans = [engine.plan() for _ in range(2)]
    engine.absorb()
    engine.absorb()
    quiet = engine.plan()
    assert plans[0] is not None and len(plans[0].admit) == 256
    assert quiet is not None and len(msgspec.msgpack.encode(quiet)) < 40
    engine.run()


def test_two_steps_are_planned_before_the_first_result() -> None:
    engine = EngineModel(limits())
    engine.add([1, 2, 3], max_tokens=10, ignore_eos=True)
    assert engine.plan() is not None and engine.plan() is not None
    engine.run()


def test_surplus_token_of_an_ended_sequence_is_thrown_away() -> None:
    engine = EngineModel(limits())
    seq_id = engine.add([1, 2, 3], max_tokens=20, ignore_eos=True)
    engine.run()
    stop = engine.answers[seq_id][2]
    end = engine.answers[seq_id].index(stop) + 1
    again = engine.add([1, 2, 3], max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    engine.run()
    assert engine.answers[again] == engine.answers[seq_id][:end]
    assert engine.finished[again] == "stop"


def test_every_fourth_pick_is_the_oldest() -> None:
    engine = EngineModel(limits(max_running_requests=1, num_pages=200))
    engine.add(DOCUMENT, max_tokens=1)
    engine.run()
    strangers = [engine.add([90 + i] * 8, max_tokens=1) for i in range(3)]
    readers = [engine.add([*DOCUMENT, i], max_tokens=1) for i in range(9)]
    order: list[int] = []
    while len(engine.finished) < 13:
        while len(engine.sent) < 1 and engine.plan() is not None:
            pass
        order += finished(engine.absorb())
    # the very first request was pick number one
    expected = [
        *readers[:2],
        strangers[0],
        *readers[2:5],
        strangers[1],
        *readers[5:8],
        strangers[2],
        readers[8],
    ]
    assert order == expected


def test_fcfs_keeps_the_order_of_arrival() -> None:
    engine = EngineModel(limits(max_running_requests=1, schedule_policy="fcfs"))
    seq_ids = [engine.add([i, i + 1, i + 2] * 3, max_tokens=2, ignore_eos=True) for i in range(6)]
    engine.run()
    assert list(engine.finished) == seq_ids


def test_full_queue_refuses_with_a_time_to_come_back() -> None:
    scheduler = Scheduler(limits(max_queued_requests=2))
    assert scheduler.add(request(0, [1])) is None
    assert scheduler.add(request(1, [1])) is None
    refused = scheduler.add(request(2, [1]))
    assert refused is not None and refused.status == 503 and (refused.retry_after_s or 0) >= 1
    scheduler.release(np.array([0], dtype=np.int32))
    assert scheduler.add(request(3, [1])) is None


def test_too_long_a_sequence_is_refused_instead_of_waiting_for_ever() -> None:
    scheduler = Scheduler(limits(num_pages=4, page_size=4, context_length=256))
    refused = scheduler.add(request(0, [1] * 14, max_tokens=3))
    assert refused is not None and refused.status == 400


def test_release_gives_pages_back_at_the_next_plan() -> None:
    engine = EngineModel(limits())
    seq_id = engine.add(list(range(30)), max_tokens=100, ignore_eos=True)
    for _ in range(5):
        engine.plan()
        engine.absorb()
    engine.release(seq_id)
    stats = engine.scheduler.stats()
    assert (
        stats.running == 0
        and stats.pages_owned == 0
        and stats.pages_evictable == stats.pages_cached
    )
    check_invariants(engine.scheduler)
    assert engine.plan() is None


def test_a_stop_string_found_later_counts_as_an_end_and_not_as_an_abort() -> None:
    engine = EngineModel(limits())
    seq_id = engine.add(list(range(8)), max_tokens=100, ignore_eos=True)
    for _ in range(3):
        engine.plan()
        engine.absorb()
    engine.scheduler.release(np.array([seq_id], dtype=np.int32), complete=True)
    stats = engine.scheduler.stats()
    assert (stats.finished, stats.aborted, stats.running) == (1, 0, 0)


def test_release_of_an_unknown_sequence_is_ignored() -> None:
    engine = EngineModel(limits())
    engine.scheduler.release(np.array([99], dtype=np.int32))
    engine.add([1, 2], max_tokens=3)
    engine.run()


def test_deadline_drops_waiting_and_running_sequences() -> None:
    scheduler = Scheduler(limits(max_running_requests=1))
    now = time.time()
    for seq_id in range(2):
        late = request(seq_id, [1, 2, 3], max_tokens=50)
        scheduler.add(
            SequenceRequest(
                seq_id=seq_id,
                token_ids=late.token_ids,
                options=RequestOptions(sampling=late.sampling, deadline=now + 5),
            )
        )
    scheduler.plan()
    assert scheduler.open.next_deadline() == now + 5
    assert not scheduler.drop_expired(now)
    dropped = scheduler.drop_expired(now + 6)
    assert {i: report.finish_reason for i, report in dropped.items()} == {0: "abort", 1: "abort"}
    assert scheduler.num_running == 0 and scheduler.open.next_deadline() is None
    check_invariants(scheduler)


def test_a_sequence_that_ends_before_its_deadline_leaves_nothing_behind() -> None:
    """Also where a sequence that came before it waits still."""
    scheduler = Scheduler(limits(max_running_requests=1, max_queue_seconds=3600))
    now, counted = time.time(), 2000
    for seq_id in range(counted):
        sampling = SamplingParams(max_tokens=4)
        options = RequestOptions(sampling=sampling, deadline=now + 3600 + seq_id)
        assert (
            scheduler.add(
                SequenceRequest(seq_id=seq_id, token_ids=pack_ids([1, 2, 3]), options=options)
            )
            is None
        )
        if seq_id:
            scheduler.release(np.array([seq_id], dtype=np.int32))
    gc.collect()
    assert sum(isinstance(one, Sequence) for one in gc.get_objects()) == 1
    assert len(scheduler.open._deadlines._entries) < counted
    assert scheduler.open.next_deadline() == now + 3600
    scheduler.release(np.array([0], dtype=np.int32))
    assert scheduler.open.next_deadline() is None
    assert scheduler.open.queue_time.seconds_to_next_overdue() is None


def test_flush_drops_only_what_nobody_uses() -> None:
    engine = EngineModel(limits())
    engine.add(list(range(16)), max_tokens=1)
    engine.run()
    engine.add([40 + i % 3 for i in range(16)], max_tokens=50, ignore_eos=True)
    engine.plan()
    cached = engine.scheduler.stats()
    freed = engine.scheduler.flush_cache()
    assert freed == cached.pages_evictable == 4
    check_invariants(engine.scheduler)
    engine.run()


def test_retracted_sequences_find_their_kv_in_the_tree() -> None:
    engine = EngineModel(
        limits(num_pages=64, context_length=250, max_running_requests=8), reckless=True
    )
    for i in range(6):
        engine.add([i] * 10, max_tokens=100, ignore_eos=True)
    engine.run()
    assert engine.scheduler.state.counters.retractions > 0
    needed = 6 * (10 + 100 - 1)
    assert engine.worker.computed_tokens < 2 * needed


@pytest.mark.parametrize("policy", ["lpm", "suf", "fcfs", "priority"])
def test_the_oldest_that_runs_is_never_retracted_while_another_could_be(
    policy: SchedulePolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[tuple[int, int]] = []

    def choose(running: list[Sequence], order: QueueOrder) -> Sequence:
        victim = choose_victim(running, order)
        places = sorted(running, key=lambda s: (order.rank(s), s.seq_id))
        choices.append((len(running), places.index(victim)))
        assert order.rank(victim) == order.rank(places[-1])
        return victim

    monkeypatch.setattr("radixrt.scheduler.planner.choose_victim", choose)
    engine = EngineModel(
        limits(num_pages=30, context_length=100, schedule_policy=policy), reckless=True
    )
    for i in range(40):
        engine.add([i, 1, 2], max_tokens=60, ignore_eos=True, priority=-(i % 3))
    engine.run()
    assert len(choices) > 20
    assert all(place > 0 for candidates, place in choices if candidates > 1)


def test_the_most_urgent_run_first_and_are_retracted_last() -> None:
    engine = EngineModel(
        limits(num_pages=30, context_length=100, schedule_policy="priority"), reckless=True
    )
    late = [engine.add([i, 1, 2], max_tokens=60, ignore_eos=True, priority=5) for i in range(10)]
    urgent = [engine.add([i, 3], max_tokens=60, ignore_eos=True, priority=-5) for i in range(3)]
    engine.run()
    assert engine.scheduler.state.counters.retractions > 0
    assert list(engine.finished)[:3] == urgent and set(list(engine.finished)[3:]) == set(late)


def test_eos_is_a_stop_unless_ignored() -> None:
    engine = EngineModel(limits())
    endless = engine.add([2, 9], max_tokens=120, ignore_eos=True)
    engine.run()
    assert EOS in engine.answers[endless][:-1]
    stopped = engine.add([2, 9], max_tokens=120)
    engine.run()
    assert engine.answers[stopped][-1] == EOS and engine.finished[stopped] == "stop"


def test_first_batch_reports_cached_tokens_and_times() -> None:
    engine = EngineModel(limits())
    engine.add(list(range(12)), max_tokens=1)
    engine.plan()
    batch = engine.absorb()
    (first,), (last,) = started(batch).values(), finished(batch).values()
    assert (first.prompt_tokens, first.cached_tokens, first.finish_reason) == (12, 0, None)
    assert first.queued_s >= 0 and first.prefill_s > 0
    assert last.finish_reason == "length" and last.cached_tokens == 0
    assert last.total_s >= first.prefill_s == last.prefill_s
    assert [*batch.outputs] == [0] and batch.num_tokens == 1


def test_times_are_those_of_the_clock_it_was_given() -> None:
    now = 100.0
    engine = EngineModel(limits(max_running_requests=1), clock=lambda: now)
    for prompt in ([1, 2], [3, 4]):
        engine.add(prompt, max_tokens=1)
    times = []
    for _ in range(2):
        engine.plan()
        now += 8.0
        batch = engine.absorb()
        (report,) = finished(batch).values()
        times.append((report.queued_s, report.prefill_s, report.total_s))
    assert times == [(0.0, 8.0, 8.0), (8.0, 8.0, 16.0)]


def test_logits_that_are_not_finite_end_that_sequence_alone_and_drop_its_kv() -> None:
    engine = EngineModel(limits())
    engine.add([40 + i % 2 for i in range(8)], max_tokens=1)
    engine.run()
    for stem in (0, 20):
        engine.add([*range(4), *range(stem, stem + 16)], max_tokens=8, ignore_eos=True)
    plan = engine.plan()
    assert plan is not None
    result = engine.worker.step(engine.sent.popleft())
    tokens = unpack_ids(result.token_ids).copy()
    tokens[0] = NO_TOKEN
    batch = engine.scheduler.absorb(msgspec.structs.replace(result, token_ids=pack_ids(tokens)))
    assert [refused.status for refused in batch.refused] == [500]
    (failed,) = (refused.seq_id for refused in batch.refused)
    assert [i for i, output in batch.outputs.items() if output.token_ids] == [3 - failed]
    stats = engine.scheduler.stats()
    assert stats.pages_evictable == 2, "the first request's pages stay, the failed one's go"
    assert stats.pages_cached == 2 + 5, "and so do the pages it shared with the other"
    check_invariants(engine.scheduler)


def test_invariant_check_sees_a_leaked_page_and_a_forgotten_lock() -> None:
    engine = EngineModel(limits())
    engine.add(list(range(20)), max_tokens=2)
    engine.run()
    engine.scheduler.state.kv.allocator.allocate(1)
    with pytest.raises(InvariantError, match="63 pages"):
        check_invariants(engine.scheduler)
    engine = EngineModel(limits())
    engine.scheduler.state.kv.tree.lock_root()
    with pytest.raises(InvariantError, match="locked 1 times, 0 running"):
        check_invariants(engine.scheduler)


def test_drafts_save_steps_and_change_no_answer() -> None:
    """The worker accepts some tokens of its drafts and rejects others; the engine model checks
    every answer and page."""
    steps = {}
    for speculates in (False, True):
        engine = EngineModel(
            limits(num_pages=40, context_length=100, speculates=speculates), reckless=True
        )
        for i in range(12):
            grammar = b"json" if i % 4 == 0 else None
            engine.add([i, 1, 2], max_tokens=60, ignore_eos=i % 3 > 0, grammar=grammar)
        engine.run()
        counters = engine.scheduler.state.counters
        steps[speculates] = counters.steps
        assert counters.retractions > 0
        assert sum(counters.accepted_draft_tokens.values()) == engine.worker.num_accepted
        assert sum(counters.drafted_tokens.values()) >= engine.worker.num_accepted
    assert engine.worker.num_accepted > 50
    assert steps[True] < 0.9 * steps[False]


def test_pages_are_allocated_ahead_as_drafts_are_accepted() -> None:
    slots = SlotTable(2, max_pages=64, page_size=4)
    sequence = Sequence(request(0, [1, 2, 3, 4], max_tokens=200), 0.0, ())
    sequence.speculates = True
    slots.put(sequence, np.empty(0, np.int32))
    headrooms = []
    for accepted in (0, 3, 15, 31, 0):
        slots.expect_drafts(sequence, accepted)
        headrooms.append(int(slots.headroom[sequence.slot]))
    assert headrooms[0] == headrooms[-1] == DRAFT_HEADROOM
    assert headrooms == sorted(headrooms[:-1]) + headrooms[-1:]
    assert headrooms[3] >= 2 * MAX_DRAFTED  # a step in flight accepts 31, and the next may too
    sequence.speculates = False
    slots.expect_drafts(sequence, 31)
    assert slots.headroom[sequence.slot] == 0


def test_nothing_of_a_lost_tokenizer_process_is_left_but_the_cache() -> None:
    """The next one may use the same ids, while the last steps are still being computed."""
    model = EngineModel(limits(max_running_requests=2))
    scheduler = model.scheduler
    for grammar in (None, None, None, b"a"):
        model.add([1, 2, 3, 4, 5, 6, 7, 8, len(model.requests)], 40, grammar=grammar, ignore_eos=True)  # fmt: skip
    model.plan()
    model.absorb()
    assert model.plan() is not None and model.plan() is not None
    scheduler.state.kv.leases.pin(np.arange(1, 9, dtype=np.int32), BASE_ROOT, 60.0)
    assert scheduler.num_running == 2 and len(scheduler.state.waiting) == 1 and model.loading

    scheduler.forget_all()
    assert (
        scheduler.num_running == len(scheduler.state.waiting) == len(scheduler.state.kv.leases) == 0
    )
    check_invariants(scheduler)
    model.grammars = SentGrammars(model._to_scheduler)
    for told in (model.requests, model.answers, model.finished):
        told.clear()
    for grammar in (b"a", None, b"b"):
        model.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, grammar=grammar)
    model.run()
    assert model.cached[0] == 8 and scheduler.state.counters.aborted == 4
