"""States of recurrent layers behind the pages of the tree: what is kept, and what a request finds.

The worker of these tests checks the state of every row that it computes against the tokens before
it, so a wrong one fails wherever it is used.
"""

import numpy as np
import pytest

from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.calls import CacheTreeCall, CallReply, MatchCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import CacheHints, Retention, TokenPrompt
from radixrt.messages.steps import EMPTY_STATE
from radixrt.scheduler.radix.state_orders import ANSWER_STRIDE
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.view import TreeView
from tests.scheduler.engine_model import EngineModel, limits

PAGE = 4


def engine(**changes: object) -> EngineModel:
    """One whose states are kept every 8 pages, unless a rule asks for one earlier."""
    settings = {"page_size": PAGE, "kept_states": 64, "state_interval": 8 * PAGE} | changes
    return EngineModel(limits(**settings), has_states=True)


def ask(model: EngineModel, prompt: list[int], max_tokens: int = 2) -> int:
    """Answer one request alone; returns its cached tokens."""
    seq_id = model.add(prompt, max_tokens, ignore_eos=True)
    model.run()
    return model.cached[seq_id]


def whole_pages(num_tokens: int) -> int:
    return num_tokens // PAGE * PAGE


@pytest.mark.parametrize("chunk", [7, 32])
def test_every_shared_prefix_hits_to_the_page_from_its_second_repetition(chunk: int) -> None:
    for length in range(1, 70):
        model = engine(chunked_prefill_size=chunk)
        prefix = [(7 * i) % 11 for i in range(length)]
        ask(model, [*prefix, 20, 21, 22, 23, 24])
        first = ask(model, [*prefix, 30, 31, 32, 33, 34])
        assert first <= whole_pages(length)
        assert ask(model, [*prefix, 40, 41, 42, 43, 44]) == whole_pages(length)


def test_an_identical_prompt_computes_its_last_page_only() -> None:
    for length in range(1, 70):
        model, prompt = engine(), [(5 * i) % 13 for i in range(length)]
        ask(model, prompt)
        assert ask(model, prompt) == whole_pages(length - 1)


@pytest.mark.parametrize("page_size", [1, 4, 16, 24])
def test_the_next_turn_continues_from_the_end_of_the_answer(page_size: int) -> None:
    """From the last end of a page, or of 16 tokens where pages are shorter."""
    stride = max(page_size, ANSWER_STRIDE)
    for max_tokens in range(1, 40):
        model = engine(page_size=page_size, state_interval=400 * page_size, num_pages=250)
        seq_id = model.add([1, 2, 3, 4, 5, 6], max_tokens, ignore_eos=True)
        model.run()
        history = [1, 2, 3, 4, 5, 6, *model.answers[seq_id]]
        # the last token of an answer is never an input
        most = (len(history) - 1) // stride * stride or 6 // page_size * page_size
        assert ask(model, [*history, 30, 31]) == most
        assert model.worker.states_written <= 6 + len(history) / stride


def test_states_that_the_worker_has_missed_do_not_fill_the_memory() -> None:
    """Forced tokens take it past positions that it is to keep the state of."""
    model = engine(kept_states=6, num_pages=300)
    for seed in range(30):
        prompt = [(seed * 7 + i * 3) % 17 for i in range(20)]
        model.add(prompt, 60, ignore_eos=True, grammar=b"json")
        model.load_grammar()
        model.run()
    assert ask(model, [3] * 41) == 0
    assert ask(model, [3] * 41) == 40
    model.plan()
    states = model.scheduler.state.kv.states
    assert states.count(np.array(list(states.pages().values()))) == len(states)


def test_an_answer_that_is_taken_back_computes_few_tokens_again() -> None:
    """A checked value was wrong: a new sequence goes on from the tokens before it."""
    for taken_back in range(1, 150, 7):
        model = engine(page_size=16, state_interval=1600, num_pages=64)
        prompt = [(i * 3) % 17 for i in range(20)]
        seq_id = model.add(prompt, 200, ignore_eos=True, grammar=b"json")
        model.load_grammar()
        while len(model.answers[seq_id]) < 180:
            model.plan()
            model.absorb()
        answer = model.answers[seq_id]
        kept = answer[: len(answer) - taken_back]
        model.release(seq_id)
        before = model.worker.computed_tokens
        again = model.add(
            [*prompt, *kept], len(kept) + 1, num_output=len(kept), grammar=b"json", ignore_eos=True
        )
        model.load_grammar()
        model.run()
        assert again in model.finished
        assert model.worker.computed_tokens - before <= max(taken_back, 16) + 3 * 16


def test_a_sequence_that_is_retracted_computes_few_tokens_again() -> None:
    model = engine(page_size=16, state_interval=1600, num_pages=64)
    prompt = [(i * 3) % 17 for i in range(20)]
    for max_tokens in range(40, 60):
        model.add([*prompt, max_tokens], max_tokens, ignore_eos=True)
        for _ in range(max_tokens - 10):
            model.plan()
            model.absorb()
        before, planner = model.worker.computed_tokens, model.scheduler.planner
        assert planner._retract()
        model.run()
        assert model.worker.computed_tokens - before <= 10 + 3 * 16


def test_sequences_with_forced_tokens_and_drafts_keep_a_state_near_their_ends() -> None:
    for options in ({"speculates": True}, {}):
        for seed in range(8):
            model = engine(page_size=16, state_interval=1600, num_pages=64, **options)
            prompt = [(seed * 7 + i * 3) % 17 for i in range(20)]
            seq_id = model.add(
                prompt, 100 + seed, ignore_eos=True, grammar=None if options else b"json"
            )
            model.load_grammar()
            model.run()
            history = [*prompt, *model.answers[seq_id]]
            assert ask(model, [*history, 30, 31]) >= len(history) - 1 - 3 * 16


def test_the_next_turn_of_a_chat_finds_the_messages_of_the_turn_before() -> None:
    """Whatever the template writes behind them, and drops in the next turn."""
    for num_messages in range(20, 40):
        model, messages = engine(), [(5 * i) % 13 for i in range(num_messages)]
        generation_prompt = list(range(20, 33))
        seq_id = model.add([*messages, *generation_prompt], 2, messages_end=num_messages)
        model.run()
        assert seq_id in model.finished
        assert ask(model, [*messages, 20, 21, 40, 41]) >= whole_pages(num_messages)


def test_a_cache_breakpoint_has_a_state() -> None:
    for covered in range(9, 30):
        model, prompt = engine(), [(5 * i) % 13 for i in range(50)]
        model.add(prompt, 2, cache_hints=CacheHints(retain=[Retention("high", covered, 60.0)]))
        model.run()
        assert ask(model, [*prompt[:covered], 40, 41]) == whole_pages(covered)


def test_a_match_of_a_prompt_ends_at_a_state() -> None:
    model, prompt = engine(), [(5 * i) % 13 for i in range(30)]
    ask(model, prompt)
    replies: list[CallReply] = []
    prompts = [TokenPrompt(pack_ids(one)) for one in (prompt, [*prompt[:21], 40])]
    model.calls(replies).take(MatchCall(prompts=prompts, root=BASE_ROOT))
    found = [one.cached_tokens for one in replies[0].value]
    assert found == [ask(model, [*prompt, 9, 9]), 0]


def test_the_view_of_the_tree_counts_the_states_of_each_node() -> None:
    model, prompt = engine(), [(5 * i) % 13 for i in range(50)]
    ask(model, prompt)
    ask(model, [*prompt[:21], 40])
    kv = model.scheduler.state.kv
    slices = TreeView(kv.tree, CacheTreeCall(call_id=1, depth=9), states=kv.states).slices()
    with pytest.raises(StopIteration) as stop:
        while True:
            next(slices)
    shown = [*stop.value.value.namespaces[0].children]
    counts = []
    while shown:
        node = shown.pop()
        counts.append(node.states)
        shown += node.children
    assert sum(counts) == len(kv.states) == len(kv.states.pages()) and max(counts) < sum(counts)


def test_eight_requests_on_one_new_document_compute_it_once() -> None:
    model = engine(num_pages=300, context_length=512)
    document = [(3 * i) % 17 for i in range(400)]
    for question in range(8):
        model.add([*document, 20 + question, 21], 2, ignore_eos=True)
    model.run()
    own = 2 + 2 + PAGE  # question, answer, and what is not a whole page
    assert model.worker.computed_tokens < len(document) + 8 * own


def test_two_prompts_that_compute_one_document_together_use_the_chunks_of_each_other() -> None:
    model = engine(chunked_prefill_size=16, max_prefill_tokens=16, num_pages=200)
    document = [(3 * i) % 17 for i in range(160)]
    model.add([*document, 30], 2, ignore_eos=True)
    model.plan()
    model.add([*document, 31], 2, ignore_eos=True)
    model.run()
    assert model.worker.computed_tokens < 1.2 * len(document)


def test_ten_conversations_over_three_states_answer_right_and_leak_none() -> None:
    model = engine(kept_states=3, num_pages=40, context_length=128)
    histories = [[i, i + 1, i + 2] for i in range(10)]
    for turn in range(4):
        ids = [model.add([*history, 30 + turn], 9, ignore_eos=True) for history in histories]
        model.run()
        for history, seq_id in zip(histories, ids, strict=True):
            history += [30 + turn, *model.answers[seq_id]]
    states = model.scheduler.state.kv.states
    assert len(states) <= 3
    model.scheduler.flush_cache()
    assert states.num_free == 3


def test_pages_that_are_evicted_take_their_states_along() -> None:
    model = engine(num_pages=20, context_length=64)
    for first in range(6):
        ask(model, [first + i for i in range(40)])
    kv = model.scheduler.state.kv
    free = set(kv.allocator.free_pages().tolist())
    assert kv.states.pages() and not free & set(kv.states.pages().values())


def test_a_worker_that_reports_a_row_late_does_not_vouch_for_its_next_state() -> None:
    states = KeptStates(num_rows=1, num_pages=8)
    states.begin_plan(5)
    row = states.keep(page=2, saves=PAGE, is_certain=False)
    assert row is not None
    states.drop_of(2)
    states.begin_plan(6)
    assert states.keep(page=3, saves=PAGE, is_certain=False) == row
    states.confirm(row, step=5)
    states.begin_plan(7)
    assert states.nearest(np.array([3])) == (0, EMPTY_STATE)
    states.confirm(row, step=6)
    assert states.nearest(np.array([3])) == (1, row)


def test_a_state_that_no_step_in_flight_has_written_is_dropped() -> None:
    states = KeptStates(num_rows=2, num_pages=8)
    states.begin_plan(5)
    rows = [states.keep(page=page, saves=PAGE, is_certain=False) for page in (2, 3)]
    for page in (2, 3):
        states.settle(page)
    states.begin_plan(6, num_in_flight=1)  # step 5
    assert states.has(2) and states.has(3)
    assert rows[0] is not None
    states.confirm(rows[0], step=5)
    states.begin_plan(6)
    assert states.has(2) and not states.has(3) and states.num_free == 1


def test_a_state_that_moves_to_another_page_can_be_read_there() -> None:
    states = KeptStates(num_rows=2, num_pages=8)
    states.begin_plan(0)
    row = states.keep(page=2, saves=PAGE)
    states.move(np.array([2]), np.array([5]))
    states.begin_plan(1)
    assert states.nearest(np.array([5])) == (1, row)
    assert (states.count(np.array([5])), states.count(np.array([2]))) == (1, 0)


def test_the_state_that_saves_least_goes_first() -> None:
    states = KeptStates(num_rows=2, num_pages=8)
    states.begin_plan(0)
    states.keep(page=0, saves=100)
    states.keep(page=1, saves=PAGE)
    assert states.keep(page=2, saves=50) is None  # this plan writes both rows
    states.begin_plan(1)
    assert states.keep(page=2, saves=50) is not None
    assert states.has(0) and not states.has(1)


def test_a_pinned_prefix_keeps_its_state() -> None:
    model = engine(kept_states=2, num_pages=200, context_length=128)
    pinned = [(3 * i) % 17 for i in range(40)]
    ask(model, [*pinned, 50])
    lease = model.scheduler.state.kv.leases.pin(np.array(pinned, dtype=np.int32), BASE_ROOT, 1000.0)
    for first in range(20, 30):
        ask(model, [first + i for i in range(40)])
    assert ask(model, [*pinned, 51, 52]) == len(pinned)
    model.scheduler.state.kv.leases.end(lease)
    for first in range(20, 30):
        ask(model, [first + i for i in range(40)])
    assert ask(model, [*pinned, 53, 54]) == 0


def test_a_lease_on_the_beginning_of_an_edge_pins_a_state_of_its_own_prefix() -> None:
    model = engine(kept_states=40, num_pages=200, state_interval=2 * PAGE)
    prompt = [(3 * i) % 17 for i in range(80)]
    ask(model, prompt)
    kv = model.scheduler.state.kv
    lease = kv.leases.pin(np.array(prompt[:42], dtype=np.int32), BASE_ROOT, 1000.0)
    match = kv.tree.match(np.array(prompt, dtype=np.int32))
    assert match is not None
    assert kv.states.pages()[lease.state] == match.pages[40 // PAGE - 1]
