"""A KV pool that outlives its scheduler: the next one has every prefix that was computed, and reads
nothing that was not.

After each death, what the record does not call complete is overwritten in the worker's pool, as a
step that was cut short may do.
"""

import os
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.page_allocator import NO_PAGES
from radixrt.scheduler.radix.pool_record import PoolRecord, open_record, record_bytes
from radixrt.scheduler.radix.state_orders import ANSWER_STRIDE
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.takeover import take_over
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.engine_model import EngineModel, limits

EXAMPLES = int(os.environ.get("RADIXRT_SCHEDULER_EXAMPLES", "30"))
CONTEXT = 96
STEMS = [[i % 5 for i in range(60)], [i % 5 for i in range(20)] + [9] * 40, [3] * 45]
PROMPT = list(range(41))

Prefixes = set[tuple[CacheRoot, bytes]]


def prefixes(tree: RadixTree) -> Prefixes:
    """All cached prefixes, page by page."""
    found, page_bytes = Prefixes(), 4 * tree.page_size
    for node in tree.nodes():
        path = list(node.path())[::-1]
        tokens = b"".join(link.edge for link in path)
        root = next(name for name, one in tree.roots().items() if one is path[0])
        found |= {(root, tokens[:end]) for end in range(page_bytes, len(tokens) + 1, page_bytes)}
    return found


def running_prefixes(engine: EngineModel) -> Prefixes:
    """The prefixes that running sequences have planned, page by page."""
    found, slots = Prefixes(), engine.scheduler.state.slots
    for sequence in slots.running():
        tokens = sequence.known_tokens()[: int(slots.planned[sequence.slot])].tobytes()
        size = 4 * slots.page_size
        found |= {(sequence.root, tokens[:end]) for end in range(size, len(tokens) + 1, size)}
    return found


class Survivor:
    """An engine whose scheduler dies, and whose pool and record stay."""

    def __init__(self, of: SchedulerLimits, state_delay: int = 0) -> None:
        self.limits, self._state_delay = of, state_delay
        self.memory = bytearray(record_bytes(of.num_pages, of.page_size))
        self.engine = EngineModel(of, has_states=of.kept_states > 0)
        self._record()

    def _record(self) -> None:
        of = self.limits
        record = PoolRecord(self.memory, of.num_pages, of.page_size, self._state_delay)
        self.taken_over = self.engine.scheduler.state.kv.keep_record(record)

    @property
    def tree(self) -> RadixTree:
        return self.engine.scheduler.state.kv.tree

    def kill(self, unanswered: int = 0) -> None:
        """
        Args:
            unanswered: steps that the worker has computed, and whose results are lost.
        """
        old = self.engine
        for _ in range(min(unanswered, len(old.sent))):
            old.worker.step(old.sent.popleft())
        complete = self._complete()
        memory = {
            place: value if complete[place[0]] else value ^ 1
            for place, value in old.worker.memory.items()
        }
        rows = set(self._recorded_states()[complete].tolist())
        kept = {row: value if row in rows else value ^ 1 for row, value in old.worker.kept.items()}
        self.engine = EngineModel(self.limits, has_states=self.limits.kept_states > 0)
        self.engine.worker.memory, self.engine.worker.kept = memory, kept
        self._record()

    def resume(self, old: EngineModel) -> int:
        """Let the open requests of a dead engine go on behind the tokens that their clients have;
        returns their number."""
        left = [seq_id for seq_id in old.requests if seq_id not in old.finished]
        for seq_id in left:
            request, answer = old.requests[seq_id], old.answers[seq_id]
            assert request.sampling.max_tokens is not None
            self.engine.add(
                unpack_ids(request.token_ids).tolist() + answer,
                request.sampling.max_tokens,
                request.options.root.salt,
                grammar=None if request.grammar is None else b"json",
                num_output=request.num_output + len(answer),
                ignore_eos=request.sampling.ignore_eos,
            )
        return len(left)

    def _complete(self) -> np.ndarray:
        """Whether each page is complete, as the memory has it."""
        return np.frombuffer(self.memory, np.uint8, self.limits.num_pages, 64).astype(bool)

    def complete_pages(self) -> set[int]:
        return {*np.flatnonzero(self._complete()).tolist()}

    def held_pages(self) -> set[int]:
        """The pages of the tree and of running sequences."""
        slots = self.engine.scheduler.state.slots
        tables = [slots.block_table(one.slot) for one in slots.running()]
        return {
            *np.concatenate([NO_PAGES, *(n.pages for n in self.tree.nodes()), *tables]).tolist()
        }

    def _recorded_states(self) -> np.ndarray:
        """The row of the state behind each page, as the memory has it."""
        of = self.limits
        end = -(-4 * of.num_pages // 64) * 64
        start = len(self.memory) - end
        return np.frombuffer(self.memory, np.int32, of.num_pages, start) - 1

    def states(self) -> set[int]:
        """The pages of the tree behind which there is a state."""
        pages = {page for node in self.tree.nodes() for page in node.pages.tolist()}
        return self.engine.scheduler.state.kv.states.readable_pages() & pages

    def answer(self, prompt: list[int], **options: Any) -> int:
        """The cached tokens of a request."""
        seq_id = self.engine.add(prompt, **options)
        self.engine.run()
        return self.engine.cached[seq_id]


@pytest.fixture
def survivor() -> Survivor:
    return Survivor(limits(num_pages=40))


def test_the_next_scheduler_has_the_whole_tree(survivor: Survivor) -> None:
    for prompt in (PROMPT, PROMPT[:21] + [7, 8] * 10, [9] * 30):
        survivor.answer(prompt)
    survivor.answer(PROMPT, salt="x")
    before = prefixes(survivor.tree)
    survivor.kill()
    assert prefixes(survivor.tree) == before and survivor.taken_over == survivor.tree.num_pages
    assert survivor.answer(PROMPT) == survivor.answer(PROMPT, salt="x") == 40
    assert survivor.answer(PROMPT, salt="y") == 0


def test_a_prompt_is_recorded_chunk_by_chunk_as_its_steps_are_answered(survivor: Survivor) -> None:
    engine = survivor.engine
    engine.add(list(range(100)), 4)
    engine.plan()
    survivor.kill()
    assert survivor.taken_over == 0, "no step was answered"
    survivor.engine.add(list(range(100)), 4)
    survivor.engine.plan()
    survivor.engine.plan()
    survivor.engine.absorb()
    survivor.kill(unanswered=1)
    assert survivor.taken_over == 32 // 4
    assert survivor.answer(list(range(100))) == 32


def test_what_was_used_last_is_evicted_last_after_a_death(survivor: Survivor) -> None:
    for number in range(4):
        survivor.answer([number] * 30)
    survivor.kill()
    survivor.answer([8] * 70)
    assert survivor.answer([3] * 30) == 28 and survivor.answer([0] * 30) == 0


def hybrid(**changes: int) -> SchedulerLimits:
    return limits(**({"num_pages": 100, "kept_states": 40, "state_interval": 32} | changes))


def test_states_of_recurrent_layers_outlive_the_scheduler() -> None:
    survivor = Survivor(hybrid())
    for prompt in (PROMPT, [9] * 30):
        survivor.answer(prompt)
    before = survivor.states()
    survivor.kill()
    assert survivor.states() == before and before
    assert survivor.answer(PROMPT) == 40 and survivor.answer([9] * 30) == 28


def test_the_ranks_of_a_state_are_awaited_with_the_next_step() -> None:
    survivor = Survivor(hybrid(), state_delay=1)
    survivor.answer(PROMPT[:30], max_tokens=1)
    survivor.kill()
    assert survivor.taken_over == 7 and not survivor.states()
    survivor.answer(PROMPT[:30], max_tokens=2)
    survivor.kill()
    assert survivor.answer(PROMPT[:30]) == 28


def answering(survivor: Survivor, steps: int) -> int:
    """Take so many steps, with two in flight; returns the tokens of the last two."""
    tokens = []
    for _ in range(steps):
        while len(survivor.engine.sent) < 2 and survivor.engine.plan() is not None:
            pass
        tokens.append(survivor.engine.absorb().num_tokens)
    return sum(tokens[-2:])


@pytest.mark.parametrize("unanswered", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "drafted", "constrained", "hybrid"])
def test_a_page_of_a_running_answer_is_computed_again_at_most(kind: str, unanswered: int) -> None:
    is_hybrid, grammar = kind == "hybrid", b"json" if kind == "constrained" else None
    survivor = Survivor(
        hybrid(num_pages=400, kept_states=100)
        if is_hybrid
        else limits(num_pages=400, speculates=kind == "drafted")
    )
    for steps in (30, 41):
        for number in range(4):
            prompt = [steps, number, *PROMPT[: 20 + number]]
            survivor.engine.add(prompt, 230, grammar=grammar, ignore_eos=True)
        if grammar is not None:
            survivor.engine.load_grammar()
        in_flight = answering(survivor, steps)
        old = survivor.engine
        survivor.kill(unanswered)
        assert survivor.resume(old) == 4
        survivor.engine.run()
        counters = survivor.engine.scheduler.state.counters
        again = counters.prompt_tokens - counters.cached_tokens
        page = ANSWER_STRIDE if is_hybrid else 4
        assert 0 < again <= 4 * page + in_flight < sum(map(len, old.answers.values())) - 4


def test_equal_answers_leave_one_copy_of_each_page() -> None:
    """What continues the other copy continues this one, and the other is free."""
    survivor = Survivor(limits(num_pages=100))
    for max_tokens in (30, 80):
        survivor.engine.add(PROMPT, max_tokens, ignore_eos=True)
    answering(survivor, 31)
    assert len(survivor.complete_pages()) == (40 + 2 * 28) // 4
    old, before = survivor.engine, running_prefixes(survivor.engine)
    survivor.kill()
    assert survivor.taken_over == (40 + 28) // 4 and prefixes(survivor.tree) <= before
    assert survivor.complete_pages() == survivor.held_pages()
    survivor.resume(old)
    answering(survivor, 20)
    old = survivor.engine
    survivor.kill()
    survivor.resume(old)
    survivor.answer([9] * 200)
    assert survivor.complete_pages() <= survivor.held_pages()


def recorded(memory: bytearray) -> list[list[int]]:
    return [prefix.pages.tolist() for prefix in PoolRecord(memory, 8, 4).take_prefixes()]


def enter(record: PoolRecord, first_token: int, pages: list[int]) -> None:
    """Let a prefix enter the tree."""
    tokens = np.arange(first_token, first_token + 4 * len(pages), dtype=np.int32)
    record.stored(BASE_ROOT, None, tokens, np.array(pages, np.int32))


def test_the_state_behind_a_copy_belongs_to_the_page_that_is_kept() -> None:
    memory = bytearray(record_bytes(8, 4))
    record = PoolRecord(memory, 8, 4)
    enter(record, 0, [3, 4])
    enter(record, 0, [5, 6])
    record.sent(0)
    record.state_written(6, 2, 0)
    record.done(0)
    for _ in range(2):  # the second time from what the first has recorded
        states, tree = KeptStates(num_rows=4, num_pages=8), RadixTree(page_size=4)
        assert take_over(PoolRecord(memory, 8, 4), tree, states).tolist() == [3, 4]
        assert states.nearest(np.array([3, 4])) == (2, 2) and not states.has(6)


def test_a_page_whose_prefix_is_gone_stays_lost() -> None:
    """A removal that was cut short: the first page of a prefix is gone, the second is not. It must
    not belong to what is in the place of the first one day."""
    memory = bytearray(record_bytes(8, 4))
    record = PoolRecord(memory, 8, 4)
    enter(record, 0, [3, 4])
    record.sent(0)
    record.done(0)
    assert recorded(memory) == [[3, 4]]
    memory[64 + 3] = 0
    assert recorded(memory) == []
    record = PoolRecord(memory, 8, 4)
    enter(record, 100, [3])
    record.sent(0)
    record.done(0)
    assert recorded(memory) == [[3]]


def test_a_page_that_leaves_before_its_step_is_answered_is_never_complete() -> None:
    memory = bytearray(record_bytes(8, 4))
    record = PoolRecord(memory, 8, 4)
    enter(record, 0, [3, 4])
    record.removed(np.array([4], np.int32))
    record.sent(5)
    record.removed(np.array([3], np.int32))
    enter(record, 50, [3])
    record.done(5)
    assert recorded(bytearray(memory)) == []
    record.sent(6)
    record.done(6)
    assert recorded(memory) == [[3]]


def test_pages_behind_an_adapters_invocation_mean_nothing_to_the_next_process() -> None:
    adapter = AdapterInfo(name="a", digest="a", path="", place=0, invocation=(16, 17))
    survivor = Survivor(limits(num_pages=40, adapters=(adapter,), num_adapter_places=2))
    survivor.answer(PROMPT, adapter="a")
    survivor.kill()
    assert survivor.answer(PROMPT, adapter="a") == 16


def test_a_record_of_another_pool_is_emptied() -> None:
    def opened(pool_id: str) -> int:
        record = open_record(os.dup(fd), pool_id, 40, 4)
        assert record is not None
        engine = EngineModel(limits(num_pages=40))
        engine.worker.memory = memory
        found = engine.scheduler.state.kv.keep_record(record)
        engine.add(PROMPT)
        engine.run()
        return found

    memory: dict[tuple[int, int], int] = {}
    fd = os.memfd_create("record")
    assert opened("one") == 0 < opened("one")
    assert opened("two") == 0 < opened("two")
    assert open_record(os.dup(fd), "", 40, 4) is None, "the pool is not shared"
    os.close(fd)


class SurvivorMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        spare=st.integers(0, 30),
        running=st.integers(1, 5),
        states=st.sampled_from([0, 5, 20]),
        state_delay=st.integers(0, 1),
    )
    def begin(
        self, page_size: int, spare: int, running: int, states: int, state_delay: int
    ) -> None:
        self.states_are_sure = state_delay == 0
        num_pages = -(-CONTEXT // page_size) + spare
        self.survivor = Survivor(
            limits(
                page_size=page_size,
                num_pages=num_pages,
                context_length=CONTEXT,
                max_running_requests=running,
                kept_states=states,
                state_interval=2 * page_size,
            ),
            state_delay,
        )

    @property
    def engine(self) -> EngineModel:
        return self.survivor.engine

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 60),
        tail=st.lists(st.integers(0, 4), min_size=1, max_size=8),
        max_tokens=st.integers(0, 20),
        salt=st.sampled_from(["", "", "", "tenant"]),
    )
    def arrive(
        self, stem: list[int], cut: int, tail: list[int], max_tokens: int, salt: str
    ) -> None:
        self.engine.add(stem[:cut] + tail, max_tokens, salt)

    @precondition(lambda self: len(self.engine.sent) < 2)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.sent)
    @rule(fail=st.sampled_from([False, False, False, True]))
    def absorb(self, fail: bool) -> None:
        self.engine.absorb(fail_first=fail)

    @precondition(lambda self: len(self.engine.requests) > len(self.engine.finished))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ones = sorted(set(self.engine.requests) - set(self.engine.finished))
        self.engine.release(data.draw(st.sampled_from(open_ones)))

    @rule()
    def flush(self) -> None:
        self.engine.scheduler.flush_cache()

    @rule(unanswered=st.integers(0, 2), resumes=st.booleans())
    def kill(self, unanswered: int, resumes: bool) -> None:
        all_done = not self.engine.sent
        if all_done:
            self.engine.plan()
            all_done = not self.engine.sent
        before, states = prefixes(self.survivor.tree), self.survivor.states()
        old, running = self.engine, running_prefixes(self.engine)
        self.survivor.kill(unanswered)
        after = prefixes(self.survivor.tree)
        assert after <= before | running
        assert after == before or not all_done, "all steps were answered, so nothing may be lost"
        assert self.survivor.complete_pages() == self.survivor.held_pages()
        if resumes:
            self.survivor.resume(old)
        if all_done and self.states_are_sure:
            assert self.survivor.states() == states

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "survivor"):
            check_invariants(self.engine.scheduler)
            assert self.survivor.complete_pages() <= self.survivor.held_pages()

    def teardown(self) -> None:
        if hasattr(self, "survivor"):
            self.engine.run()


SurvivorMachine.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None
)
TestSurvivor = SurvivorMachine.TestCase
