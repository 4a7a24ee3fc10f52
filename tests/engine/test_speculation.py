"""Answers with drafts are those without, token for token, and nothing that was rejected stays
anywhere."""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CpuDevice
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.drafts.price import DraftPrice
from tests.checkpoints import END_OF_TURN
from tests.engine.in_process import InProcessEngine
from tests.engine.test_grammars import SCHEMA
from tests.scheduler.engine_model import expect_nothing

TORTURE = bool(os.environ.get("RADIXRT_TORTURE"))
ROUNDS = 25 if TORTURE else 2
"""Of twenty requests each."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price that does not depend on the machine: many drafts, and some that are not worth it."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "beside_prompts", lambda self, *_: 0.05)


@pytest.fixture(scope="module")
def schema_grammar(facts: TokenizerFacts) -> Grammar:
    return llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")


@dataclass
class Asked:
    prompt: list[int]
    sampling: SamplingParams
    json: bool = False


def twenty_requests(rng: random.Random) -> list[Asked]:
    """Of every kind of sampling, several on one document, which repeats itself; some are
    constrained."""
    phrase = [rng.randrange(3, 380) for _ in range(12)]
    document = [*phrase, rng.randrange(3, 380), *phrase, *phrase[:5]]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.6},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 1},
        {"temperature": 1.2, "top_k": 20, "logit_bias": {7: 4.0, 9: -3.0}},
        {"temperature": 0.0, "min_tokens": 8, "stop_token_ids": (11, 12, 13, 14, 15)},
        {"temperature": 0.0, "bad_words_token_ids": ((17, 18), (19,)), "logprobs": 0},
        {"temperature": 0.7, "allowed_token_ids": tuple(range(20, 60)), "prompt_logprobs": 1},
        {"temperature": 1.0, "ignore_eos": False},
    ]
    asked = []
    for index in range(20):
        kind = {"ignore_eos": True, **kinds[index % len(kinds)]}
        own = [rng.randrange(3, 380) for _ in range(rng.randint(1, 9))]
        prompt = own if index % 3 == 0 else [*document[: rng.randint(10, len(document))], *own]
        sampling = SamplingParams(
            max_tokens=rng.randint(2, 40), seed=rng.randrange(1000), **{"min_tokens": 0, **kind}
        )
        if sampling.min_tokens >= (sampling.max_tokens or 0):
            sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        asked.append(Asked(prompt, sampling))
    for index in range(0, 20, 5):
        logprobs = 1 if index % 10 else None
        penalty = 1.0 if index % 10 else 0.0
        asked[index].sampling = SamplingParams(
            temperature=0.0 if index % 10 else 1.3, seed=index, max_tokens=60, logprobs=logprobs,
            frequency_penalty=penalty,
        )  # fmt: skip
        asked[index].json = True
    return asked


def answers(
    engine: InProcessEngine, asked: list[Asked], grammar: Grammar
) -> tuple[list[list[int]], list[list[tuple[bytes, list[float]]]]]:
    """Each request twice, so that the second time finds how the first went on. Tokens, and
    log-probabilities."""
    tokens, logprobs = [], []
    for _ in range(2):
        use = engine.use(grammar)
        tokens += engine.generate(
            [one.prompt for one in asked],
            [one.sampling for one in asked],
            grammars=[use if one.json else None for one in asked],
        )
        logprobs += [
            [(row.token_ids, row.logprobs) for row in rows]
            for rows in (*engine.logprobs, *engine.prompt_logprobs)
        ]
    return tokens, logprobs


def expect_same(
    engine: InProcessEngine, plain: InProcessEngine, asked: list[Asked], grammar: Grammar
) -> None:
    (tokens, logprobs), (expected, their_logprobs) = (
        answers(one, asked, grammar) for one in (engine, plain)
    )
    for index, (mine, theirs) in enumerate(zip(tokens, expected, strict=True)):
        assert mine == theirs, asked[index % len(asked)]
    assert logprobs == their_logprobs  # bit for bit


@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_change_no_answer(model_dir: Path, schema_grammar: Grammar, page_size: int) -> None:
    rng = random.Random(page_size)
    engine = InProcessEngine(model_dir, page_size=page_size, speculation="auto")
    plain = InProcessEngine(model_dir, page_size=page_size)
    for _ in range(ROUNDS):
        expect_same(engine, plain, twenty_requests(rng), schema_grammar)
    counters = engine.scheduler.state.counters
    for name in ("grammar", "tree", "ngram", "pool"):
        assert counters.accepted_draft_tokens[name] > 0, name
        assert counters.drafted_tokens[name] >= counters.accepted_draft_tokens[name]
    assert counters.drafted_tokens["ngram"] > counters.accepted_draft_tokens["ngram"]
    assert counters.steps < 0.8 * plain.scheduler.state.counters.steps
    assert sum(plain.scheduler.state.counters.drafted_tokens.values()) == 0


def test_drafts_change_no_answer_that_is_retracted(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    crowded = InProcessEngine(model_dir, page_size=4, max_total_tokens=160, speculation="auto")
    plain = InProcessEngine(model_dir, page_size=4)
    for seed in range(ROUNDS):
        expect_same(crowded, plain, twenty_requests(random.Random(100 + seed)), schema_grammar)
    counters = crowded.scheduler.state.counters
    assert counters.retractions > 0 and sum(counters.accepted_draft_tokens.values()) > 0


def test_a_request_that_is_repeated_takes_few_steps(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir, speculation="auto")
    prompt = list(range(5, 30))
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=120, ignore_eos=True)
    first = engine.generate([prompt], sampling)
    before = engine.scheduler.state.counters.steps
    assert engine.generate([prompt], sampling) == first
    assert engine.scheduler.state.counters.steps - before < 20
    assert engine.scheduler.state.counters.accepted_draft_tokens["tree"] > 80


def test_no_draft_comes_from_another_salt(model_dir: Path) -> None:
    """A request under one salt, twice: then its text is drafted. The same under another salt:
    nothing of it is."""
    engine = InProcessEngine(model_dir, speculation="auto")
    prompt = list(range(5, 30))
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True)

    def shared(salt: str) -> int:
        """Tokens drafted from texts of other requests."""
        drafted = engine.scheduler.state.counters.drafted_tokens
        before = drafted["tree"] + drafted["pool"]
        assert len(engine.generate([prompt], sampling, salt)[0]) == 60
        return drafted["tree"] + drafted["pool"] - before

    assert shared("a") == 0
    assert shared("b") == 0
    assert shared("a") > 30
    assert shared("c") == 0


def test_a_request_can_refuse_drafts(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir, speculation="auto")
    for _ in range(2):
        engine.generate([list(range(5, 30))], GREEDY, speculation=False)
    assert sum(engine.scheduler.state.counters.drafted_tokens.values()) == 0


def test_an_answer_that_was_begun_goes_on_with_drafts(model_dir: Path) -> None:
    """As after the death of an engine, or a value that was rolled back."""
    engine = InProcessEngine(model_dir, speculation="auto")
    prompt = list(range(5, 30))
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True)
    (whole,) = engine.generate([prompt], sampling)
    for kept in (1, 17, 58):
        rest = engine.generate_from(prompt, whole[:kept], sampling)
        assert whole[:kept] + rest == whole
    assert engine.scheduler.state.counters.accepted_draft_tokens["tree"] > 30


def test_where_steps_overlap_nothing_is_drafted(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir, device=CpuDevice(overlaps=True), speculation="auto")
    first, second = (engine.generate([list(range(5, 30))], GREEDY) for _ in range(2))
    assert first == second
    assert sum(engine.scheduler.state.counters.drafted_tokens.values()) == 0


def test_the_report_counts_the_drafts(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir, speculation="auto")
    for _ in range(2):
        engine.generate([list(range(5, 30))], GREEDY)
    (report,) = engine.reports
    counters = engine.scheduler.state.counters
    assert 20 < report.accepted_prediction_tokens < report.output_tokens == 40
    assert report.accepted_prediction_tokens <= sum(counters.accepted_draft_tokens.values())
    counted = report.drafts.values()
    assert sum(accepted for _, accepted in counted) == report.accepted_prediction_tokens
    assert sum(d - a for d, a in counted) == report.rejected_prediction_tokens
    assert counters.forced_tokens == 0


def test_the_end_of_an_answer_is_not_drafted_over(model_dir: Path, schema_grammar: Grammar) -> None:
    """The second time the end is known, and comes as the last token all the same."""
    engine = InProcessEngine(model_dir, speculation="auto")
    sampling = SamplingParams(temperature=0.0, max_tokens=200, logprobs=0)
    first, second = (
        engine.generate([[5, 6, 7]], sampling, grammars=[engine.use(schema_grammar)])[0]
        for _ in range(2)
    )
    assert first == second and first.index(END_OF_TURN) == len(first) - 1
    assert len(engine.logprobs[0]) == len(first)


def test_what_a_request_forbids_is_not_accepted_from_a_draft(
    model_dir: Path, facts: TokenizerFacts
) -> None:
    """The tree drafts what an earlier request was allowed."""
    sampled = SamplingParams(temperature=1.0, seed=9, max_tokens=40, ignore_eos=True)
    engine = InProcessEngine(model_dir, speculation="auto")
    plain = InProcessEngine(model_dir)
    prompt = list(range(40, 60))
    (free,) = engine.generate([prompt], sampled)
    regex = llguidance.compile_regex("[a-c]{12}", facts)
    (path,) = engine.generate([prompt], sampled, grammars=[engine.use(regex)])
    closing = tuple(range(3, 6))
    for changes, excluded in (
        ({"bad_words_token_ids": ((free[8], free[9]), (free[20],))}, None),
        ({"max_reasoning_tokens": 12, "reasoning_closing_ids": closing}, None),
        ({"logprobs": 1, "ignore_eos": False}, path[:12]),
    ):
        sampling = msgspec.structs.replace(sampled, **changes)  # type: ignore[arg-type]
        answers = []
        for one in (engine, plain):
            use = None if excluded is None else one.use(regex, excluded=[excluded])
            answers += one.generate([prompt], sampling, grammars=[use])
        assert answers[0] == answers[1] and answers[0][:12] not in (free[:12], path[:12])
    accepted = engine.scheduler.state.counters.accepted_draft_tokens
    assert accepted["tree"] + accepted["pool"] > 10
