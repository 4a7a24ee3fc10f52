"""A mask that takes long delays only its own sequence, and changes no answer."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.llguidance import LlguidanceMatcher
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CPU, CpuDevice, Device
from radixrt.messages.grammars import GrammarUse
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.sampling import mask_filling, matchers
from radixrt.worker.sampling.grammar_loader import GrammarLoader
from radixrt.worker.sampling.mask_filling import MaskFiller, MaskJob
from radixrt.worker.sampling.matchers import SlotMatchers
from tests.checkpoints import END_OF_TURN, VOCAB_SIZE
from tests.engine.in_process import InProcessEngine
from tests.engine.test_against_transformers import make_prompts
from tests.engine.test_grammars import SCHEMA, answers, params
from tests.scheduler.engine_model import expect_nothing

DEVICES = [CPU, CpuDevice(overlaps=True)]


@pytest.fixture(scope="module")
def schema_grammar(facts: TokenizerFacts) -> Grammar:
    return llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")


class Gate:
    """Masks of one grammar after its ``first`` ones wait until the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, first: int) -> None:
        self.opened = threading.Event()
        self._first = first
        fill = LlguidanceMatcher.fill_mask

        def fill_behind_the_gate(matcher: LlguidanceMatcher, row: np.ndarray) -> None:
            if matcher._grammar.key == grammar.key:
                self._first -= 1
                if self._first < 0:
                    assert self.opened.wait(60)
            fill(matcher, row)

        monkeypatch.setattr(LlguidanceMatcher, "fill_mask", fill_behind_the_gate)


def numbers_of(engine: InProcessEngine, count: int) -> list[set[int]]:
    """The sequences that get tokens in each of the next steps that bring any."""
    steps: list[set[int]] = []
    while len(steps) < count:
        for batch in engine.advance():
            steps.append({i for i, output in batch.outputs.items() if output.token_ids})
    return steps


def finish(engine: InProcessEngine) -> dict[int, list[int]]:
    """Run until all have ended. Returns the tokens that came."""
    came: dict[int, list[int]] = {}
    while True:
        batches = engine.advance()
        for batch in batches:
            for seq_id, output in batch.outputs.items():
                came.setdefault(seq_id, []).extend(output.token_ids)
        if not batches and not engine.scheduler.num_in_flight:
            return came


def begin(
    engine: InProcessEngine, each: list[tuple[SamplingParams, GrammarUse | None]]
) -> list[int]:
    """Let requests arrive, with their grammars loaded. Returns their numbers."""
    engine._load_grammars()
    sampling, grammars = [one[0] for one in each], [one[1] for one in each]
    requests = engine._requests(make_prompts()[: len(each)], sampling, grammars=grammars)
    for request in requests:
        assert engine.scheduler.add(request) is None
    return [request.seq_id for request in requests]


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
@pytest.mark.parametrize("max_tokens", [4, 40])
def test_the_others_get_a_token_in_every_step(
    model_dir: Path,
    schema_grammar: Grammar,
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    max_tokens: int,
) -> None:
    """With 4 tokens, the last one is held: the slot is released before its token is known."""
    free = params(max_tokens=60, ignore_eos=True)
    held = params(max_tokens=max_tokens)
    quiet = InProcessEngine(model_dir, device=device, debug_disable_jump_forward=True)
    use = quiet.use(schema_grammar)
    begin(quiet, [(free, None), (held, use), (free, None)])
    expected = finish(quiet)

    engine = InProcessEngine(model_dir, device=device, debug_disable_jump_forward=True)
    use = engine.use(schema_grammar)
    monkeypatch.setattr(matchers, "MASK_BUDGET_S", 0.2)  # the first three masks are in time
    gate = Gate(monkeypatch, schema_grammar, first=3)
    begin(engine, [(free, None), (held, use), (free, None)])
    came = numbers_of(engine, 3)
    monkeypatch.setattr(matchers, "MASK_BUDGET_S", 0.01)  # and none behind them
    came += numbers_of(engine, 14 - len(came))
    assert [1 in step for step in came[:3]] == [True] * 3
    assert came[3:] == [{0, 2}] * 11
    assert engine.scheduler.state.counters.deferred_rows >= 10
    gate.opened.set()
    rest = finish(engine)
    assert rest[1] == expected[1][3:]
    assert rest[0] == expected[0][14:] and rest[2] == expected[2][14:]
    assert engine.scheduler.num_running == 0


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
def test_a_step_with_nothing_else_waits(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    monkeypatch.setattr("radixrt.worker.sampling.matchers.ALONE_BUDGET_S", 10.0)
    engine = InProcessEngine(model_dir, device=device)
    (expected,) = answers(engine, schema_grammar, 1)
    gate = Gate(monkeypatch, schema_grammar, first=5)
    opener = threading.Timer(0.1, gate.opened.set)
    opener.start()
    steps = engine.scheduler.state.counters.steps
    assert answers(engine, schema_grammar, 1) == [expected]
    assert engine.scheduler.state.counters.deferred_rows == 0
    assert engine.scheduler.state.counters.steps - steps <= len(expected) + 2


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
def test_a_step_with_nothing_else_does_not_wait_for_long(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """A request that arrives meanwhile would wait as long: a mask once took half a minute."""
    engine = InProcessEngine(model_dir, device=device)
    (expected,) = answers(engine, schema_grammar, 1)
    gate = Gate(monkeypatch, schema_grammar, first=5)
    threading.Timer(0.3, gate.opened.set).start()
    assert answers(engine, schema_grammar, 1) == [expected]
    assert engine.scheduler.state.counters.deferred_rows >= 1


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
def test_a_slot_that_waits_may_be_given_to_another(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    engine = InProcessEngine(model_dir, device=device, max_running_requests=2)
    use = engine.use(schema_grammar)
    free = params(max_tokens=80, ignore_eos=True)
    (expected,) = engine.generate([make_prompts()[0]], params(max_tokens=9, ignore_eos=True))
    gate = Gate(monkeypatch, schema_grammar, first=2)
    _, held = begin(engine, [(free, None), (params(), use)])
    assert numbers_of(engine, 6)[-1] == {held - 1}
    engine.scheduler.release(np.array([held], dtype=np.int32))
    (other,) = begin(engine, [(params(max_tokens=9, ignore_eos=True), None)])
    came = finish(engine)
    assert came[other] == expected and held not in came
    gate.opened.set()


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_slow_masks_change_no_answer(
    model_dir: Path,
    schema_grammar: Grammar,
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    page_size: int,
) -> None:
    """With forced tokens, and so few pages that sequences are retracted."""
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    quiet = InProcessEngine(model_dir, device=device, page_size=page_size)
    expected = answers(quiet, schema_grammar, max_tokens=60)
    monkeypatch.setattr(matchers, "MASK_BUDGET_S", 0.0002)
    fill, count = LlguidanceMatcher.fill_mask, iter(range(10**6))

    def sometimes_slow(matcher: LlguidanceMatcher, row: np.ndarray) -> None:
        if next(count) % 5 == 0:
            time.sleep(0.003)
        fill(matcher, row)

    monkeypatch.setattr(LlguidanceMatcher, "fill_mask", sometimes_slow)
    engine = InProcessEngine(model_dir, device=device, page_size=page_size, max_total_tokens=132)
    assert answers(engine, schema_grammar, max_tokens=60) == expected
    assert engine.scheduler.state.counters.deferred_rows > 0
    assert engine.scheduler.state.counters.retractions > 0


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
def test_a_mask_that_fails_late_ends_its_answer(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """Also if it is the last one, whose slot was released meanwhile."""
    gate = Gate(monkeypatch, schema_grammar, first=3)
    engine = InProcessEngine(model_dir, device=device, debug_disable_jump_forward=True)
    use = engine.use(schema_grammar)
    begin(engine, [(params(max_tokens=30, ignore_eos=True), None), (params(max_tokens=4), use)])
    numbers_of(engine, 8)

    def fail(matcher: LlguidanceMatcher, row: np.ndarray) -> None:
        raise GrammarExhausted("too complex")

    monkeypatch.setattr(LlguidanceMatcher, "_fill", fail)
    gate.opened.set()
    refused = []
    while not refused:
        refused += [one for batch in engine.advance() for one in batch.refused]
    assert [(one.seq_id, one.status) for one in refused] == [(1, 422)]
    finish(engine)


# ---------------------------------------------------------------- parts


class Blocking(Matcher):
    """Fills its mask when it is told to."""

    def __init__(self, facts: TokenizerFacts, *, blocks: bool) -> None:
        super().__init__(facts)
        self.go = threading.Event()
        if not blocks:
            self.go.set()

    def _fill(self, row: np.ndarray) -> None:
        assert self.go.wait(60)
        row[:] = 1

    def _take(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def _give_back(self, num_tokens: int) -> None: ...

    def _forced(self) -> list[int]:
        return []

    def _may_end(self) -> bool:
        return False

    def _copy(self) -> "Blocking":
        return self


def test_more_slow_rows_than_threads_delay_no_quick_row(facts: TokenizerFacts) -> None:
    filler = MaskFiller()
    blocking = [Blocking(facts, blocks=True) for _ in range(12)]
    quick = [Blocking(facts, blocks=False) for _ in range(4)]
    jobs = [
        MaskJob(matcher, np.zeros_like(facts.eos_mask), expected_slow=False)
        for matcher in [*blocking, *quick]
    ]
    filler.begin(jobs)
    filler.wait(jobs[12:], 30)
    assert [job.is_done for job in jobs] == [False] * 12 + [True] * 4
    for matcher in blocking:
        matcher.go.set()
    filler.wait(jobs)
    assert all(job.row.all() for job in jobs)


def test_further_steps_start_no_further_threads_and_idle_ones_end(
    facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_filling, "_THREADS", 3)
    monkeypatch.setattr(mask_filling, "_IDLE_S", 0.5)
    filler, matcher = MaskFiller(), Blocking(facts, blocks=False)
    for _ in range(300):
        rows = [np.zeros_like(facts.eos_mask) for _ in range(5)]
        jobs = [MaskJob(matcher, row, expected_slow=False) for row in rows]
        filler.begin(jobs)
        filler.wait(jobs)
        assert filler.num_threads <= 3 and all(row.all() for row in rows)
    deadline = time.monotonic() + 30
    while filler.num_threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert filler.num_threads == 0
    again = [MaskJob(matcher, np.zeros_like(facts.eos_mask), expected_slow=False)]
    filler.begin(again)
    filler.wait(again)
    assert again[0].row.all()


def test_all_ranks_hold_the_rows_that_the_first_one_holds(
    model_dir: Path, facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = GrammarLoader(model_dir / "tokenizer.json", VOCAB_SIZE, (END_OF_TURN,), lambda _: None)
    first = [Blocking(facts, blocks=True), Blocking(facts, blocks=False)]
    second = [Blocking(facts, blocks=False), Blocking(facts, blocks=True)]
    said: list[np.ndarray] = []

    def rank(own: list[Blocking], decide: Callable[[np.ndarray], np.ndarray]) -> SlotMatchers:
        held = SlotMatchers(loader, VOCAB_SIZE, eos_token_ids=(END_OF_TURN,), decide=decide)
        for slot, matcher in enumerate(own):
            grammar = SimpleNamespace(matcher=SimpleNamespace(fork=lambda matcher=matcher: matcher))
            monkeypatch.setattr(loader, "use", lambda key, grammar=grammar: grammar)
            held.admit(slot, GrammarUse(b""), np.empty(0, np.int32), may_jump=True)
        return held

    slots = np.array([0, 1])
    one = rank(first, lambda ready: (said.append(ready), ready)[1])
    with monkeypatch.context() as patient:  # a busy machine needs a while for the quick row too
        patient.setattr(matchers, "MASK_BUDGET_S", 0.5)
        ready = one.rows_ready(slots, alone=False)
    assert ready is not None and ready.tolist() == [False, True]
    other = rank(second, lambda ready: said[0])
    begin = time.perf_counter()
    threading.Timer(0.05, second[1].go.set).start()
    ready = other.rows_ready(slots, alone=False)
    assert ready is not None and ready.tolist() == [False, True]
    assert time.perf_counter() - begin > 0.02, "it has to wait for the row that the first rank has"
    first[0].go.set()
