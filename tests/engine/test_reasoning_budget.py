"""``max_reasoning_tokens`` through the real scheduler and worker: the reasoning is closed in time,
and nothing else changes."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CPU, CpuDevice, Device
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.sampling.restrictions import ReasoningBudget
from tests.engine.in_process import InProcessEngine
from tests.engine.test_against_transformers import make_prompts
from tests.engine.test_grammars import text_of
from tests.engine.test_restrictions import SCHEMA
from tests.scheduler.engine_model import expect_nothing

DEVICES = [CPU, CpuDevice(overlaps=True)]
PROMPTS = make_prompts()[:6]
FREE = [SamplingParams(temperature=1.0, seed=seed, max_tokens=48, ignore_eos=True) for seed in range(6)]  # fmt: skip


def bounded(
    free: SamplingParams, most: int, closing: Sequence[int], opening: Sequence[int] = ()
) -> SamplingParams:
    return replace(
        free,
        max_reasoning_tokens=most,
        reasoning_opening_ids=tuple(opening),
        reasoning_closing_ids=tuple(closing),
    )


def absent_from(answers: list[list[int]], count: int) -> tuple[int, ...]:
    """Tokens that occur in none of these answers."""
    used = {token for answer in answers for token in answer}
    return tuple(token for token in range(3, 384) if token not in used)[:count]


@pytest.mark.parametrize("device", DEVICES, ids=["in_turn", "overlapping"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_reasoning_has_exactly_its_tokens(model_dir: Path, device: Device, length: int) -> None:
    engine = InProcessEngine(model_dir, device=device)
    free = engine.generate(PROMPTS, FREE)
    closing = absent_from(free, length)
    most = [length, length + 1, 10, 20, 47, 60]
    settings = [bounded(one, n, closing) for one, n in zip(FREE, most, strict=True)]
    for answer, before, n in zip(engine.generate(PROMPTS, settings), free, most, strict=True):
        assert len(answer) == len(before)
        cut = n - length
        assert answer[:cut] == before[:cut]
        assert answer[cut:n] == list(closing)[: max(0, len(answer) - cut)]
        assert n > 20 or answer[n:] != before[n:]


@pytest.mark.parametrize("device", DEVICES, ids=["in_turn", "overlapping"])
def test_reasoning_that_ends_earlier_is_left_alone(model_dir: Path, device: Device) -> None:
    engine = InProcessEngine(model_dir, device=device)
    free = engine.generate(PROMPTS, FREE)
    settings = [
        bounded(FREE[0], 20, free[0][7:9]),  # the model closes it itself
        bounded(FREE[1], 9, free[1][7:9]),  # with the last of its tokens
        bounded(FREE[2], 20, absent_from(free, 1), absent_from(free, 2)),  # it opens none
        bounded(FREE[3], 20, absent_from(free, 1), free[3][20:21]),  # or too late
        bounded(FREE[4], 49, absent_from(free, 1)),
        FREE[5],
    ]
    assert engine.generate(PROMPTS, settings) == free


def test_a_mark_that_the_model_has_begun_is_completed(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir)
    free = engine.generate(PROMPTS, FREE)
    (other,) = absent_from(free, 1)
    closing = (free[0][19], other)
    answer = engine.generate(PROMPTS[:1], [bounded(FREE[0], 21, closing)])[0]
    assert answer[:21] == [*free[0][:20], other]
    opened = engine.generate(PROMPTS[:1], [bounded(FREE[0], 12, (other,), free[0][2:4])])[0]
    assert opened[:12] == [*free[0][:11], other]


def test_the_count_survives_retraction(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    quiet = InProcessEngine(model_dir, page_size=4)
    closing = absent_from(quiet.generate(PROMPTS, FREE), 2)
    settings = [bounded(one, 12 + 5 * index, closing) for index, one in enumerate(FREE)]
    expected = quiet.generate(PROMPTS, settings)
    crowded = InProcessEngine(model_dir, page_size=4, max_total_tokens=132)
    assert crowded.generate(PROMPTS, settings) == expected
    assert crowded.scheduler.state.counters.retractions > 0


def test_an_answer_goes_on_from_any_of_its_tokens(model_dir: Path) -> None:
    """As after a takeover."""
    engine = InProcessEngine(model_dir)
    closing = absent_from(engine.generate(PROMPTS, FREE), 3)
    sampling = bounded(FREE[2], 20, closing)
    whole = engine.generate(PROMPTS[2:3], [sampling])[0]
    for begun in (1, 16, 17, 18, 19, 20, 21, 40):
        rest = engine.generate_from(PROMPTS[2], whole[:begun], sampling)
        assert rest == whole[begun:], begun


@pytest.mark.parametrize(
    ("text", "is_over", "forced"),
    [
        ("Hm . a b c", True, ""),  # no reasoning is opened
        ("<t >", False, ""),
        ("<t >\n Hm .</t >\n\n", True, ""),
        ("<t > a .</t b c d", False, "</"),  # what is begun in other tokens is not completed
        ("<t > a b c </", False, "t>"),
        ("<t > a b c </ t> e", True, ""),
        ("<t ></t", False, ""),
        ("<t ></t> e", True, ""),
    ],
)
def test_the_tags_may_be_written_in_any_tokens(text: str, is_over: bool, forced: str) -> None:
    """Words are the tokens here; with at least eight, nothing is left but to close."""
    words = ["<t>", "</", "t>", *dict.fromkeys(text.split(" "))]
    sampling = bounded(FREE[0], 7, [1, 2], [0])
    output = np.array([words.index(word) for word in text.split(" ")], dtype=np.int32)
    budget = ReasoningBudget(sampling, output, lambda token: tuple(words[token].encode()))
    assert budget.is_over == is_over
    assert ("" if budget.next_token is None else words[budget.next_token]) == forced


@pytest.mark.parametrize("device", DEVICES, ids=["in_turn", "overlapping"])
def test_a_grammar_begins_behind_the_forced_end(
    model_dir: Path, facts: TokenizerFacts, device: Device
) -> None:
    engine = InProcessEngine(model_dir, device=device)
    closing = absent_from(engine.generate(PROMPTS, FREE), 2)
    grammar = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    settings = [replace(bounded(one, 8, closing), ignore_eos=False, max_tokens=100) for one in FREE]
    use = engine.use(grammar, begin_after=list(closing))
    for answer in engine.generate(PROMPTS, settings, grammars=[use] * len(PROMPTS)):
        assert answer[6:8] == list(closing)
        jsonschema.validate(json.loads(text_of(facts, answer[8:])), SCHEMA)
    assert engine.scheduler.state.counters.forced_tokens > 0


@pytest.mark.parametrize("device", DEVICES, ids=["in_turn", "overlapping"])
def test_a_grammar_may_cover_the_reasoning(
    model_dir: Path, facts: TokenizerFacts, device: Device
) -> None:
    """The mask that was filled for the forced token is not that of the next."""
    grammar = llguidance.compile_regex(r"[a-w ]{1,60}\|[yz]{3}", facts)
    engine = InProcessEngine(model_dir, device=device)
    closing = facts.encode("|")
    for most in (4, 7, 12):
        free = replace(FREE[0], ignore_eos=False, max_tokens=100, seed=most)
        use = engine.use(grammar)
        (answer,) = engine.generate(PROMPTS[:1], [bounded(free, most, closing)], grammars=[use])
        assert re.fullmatch(r"[a-w ]+\|[yz]{3}", text_of(facts, answer))
        assert answer.index(closing[0]) < most
