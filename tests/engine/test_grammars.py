"""Constrained answers through the real scheduler and worker: masks, forced tokens, retraction,
exclusions."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CPU, CpuDevice, Device
from radixrt.messages.ids import pack_ids
from radixrt.scheduler.queue.admission import Admission
from tests.checkpoints import END_OF_TURN
from tests.engine.in_process import InProcessEngine
from tests.engine.test_against_transformers import make_prompts
from tests.scheduler.engine_model import expect_nothing

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["first-class citizen", "second-hand clothes"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def schema_grammar(facts: TokenizerFacts) -> Grammar:
    return llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")


def params(seed: int | None = None, **changes: object) -> SamplingParams:
    settings: dict = {"temperature": 0.0 if seed is None else 1.5, "seed": seed, "max_tokens": 200}
    return SamplingParams(**{**settings, **changes})


def text_of(facts: TokenizerFacts, answer: list[int]) -> str:
    assert answer[-1] == END_OF_TURN, "the answer did not come to its end"
    return b"".join(facts.tokens[token] for token in answer[:-1]).decode()


def answers(
    engine: InProcessEngine, grammar: Grammar, count: int = 8, **changes: object
) -> list[list[int]]:
    prompts = [make_prompts()[i % len(make_prompts())] for i in range(count)]
    each = [params(None if i % 4 == 0 else i, **changes) for i in range(count)]
    return engine.generate(prompts, each, grammars=[engine.use(grammar)] * count)


def test_every_answer_satisfies_its_schema(
    model_dir: Path, facts: TokenizerFacts, schema_grammar: Grammar
) -> None:
    texts = [text_of(facts, a) for a in answers(InProcessEngine(model_dir), schema_grammar)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_jumping_over_forced_tokens_changes_no_answer(
    model_dir: Path, schema_grammar: Grammar, page_size: int
) -> None:
    jumping = InProcessEngine(model_dir, page_size=page_size)
    stepping = InProcessEngine(model_dir, page_size=page_size, debug_disable_jump_forward=True)
    assert answers(jumping, schema_grammar) == answers(stepping, schema_grammar)
    assert jumping.scheduler.state.counters.forced_tokens > 50
    assert stepping.scheduler.state.counters.forced_tokens == 0
    assert jumping.scheduler.state.counters.steps < 0.8 * stepping.scheduler.state.counters.steps


def test_penalties_count_the_tokens_jumped_over(model_dir: Path, schema_grammar: Grammar) -> None:
    penalties = {"frequency_penalty": 1.0, "repetition_penalty": 1.3}
    jumping = answers(InProcessEngine(model_dir), schema_grammar, **penalties)
    stepping = InProcessEngine(model_dir, debug_disable_jump_forward=True)
    assert jumping == answers(stepping, schema_grammar, **penalties)


def test_a_retracted_answer_goes_on_where_its_grammar_was(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    quiet = answers(InProcessEngine(model_dir, page_size=4), schema_grammar, max_tokens=60)
    crowded = InProcessEngine(model_dir, page_size=4, max_total_tokens=132)
    assert answers(crowded, schema_grammar, max_tokens=60) == quiet
    assert crowded.scheduler.state.counters.retractions > 0


def test_constrained_and_free_answers_share_a_batch(
    model_dir: Path, facts: TokenizerFacts, schema_grammar: Grammar
) -> None:
    free = params(max_tokens=20, ignore_eos=True)
    prompts = make_prompts()[:4]
    alone = InProcessEngine(model_dir).generate(prompts, free)
    engine = InProcessEngine(model_dir)
    mixed = engine.generate(
        [*prompts, prompts[0]],
        [free] * 4 + [params()],
        grammars=[None] * 4 + [engine.use(schema_grammar)],
    )
    assert mixed[:4] == alone
    jsonschema.validate(json.loads(text_of(facts, mixed[4])), SCHEMA)


def test_logprobs_come_one_a_token(model_dir: Path, schema_grammar: Grammar) -> None:
    engine = InProcessEngine(model_dir)
    (answer,) = answers(engine, schema_grammar, 1, logprobs=2)
    assert len(engine.logprobs[0]) == len(answer)


def test_an_answer_that_was_begun_goes_on_in_its_grammar(
    model_dir: Path, schema_grammar: Grammar
) -> None:
    engine = InProcessEngine(model_dir)
    (whole,) = answers(engine, schema_grammar, 1)
    prompt = make_prompts()[0]
    for kept in (0, 1, 7, len(whole) - 2):
        rest = engine.generate_from(prompt, whole[:kept], params(), engine.use(schema_grammar))
        assert whole[:kept] + rest == whole


def test_an_excluded_path_is_not_taken_again(model_dir: Path, facts: TokenizerFacts) -> None:
    grammar = llguidance.compile_regex("(red|green|blue|black)", facts)
    engine = InProcessEngine(model_dir)
    prompt, seen = make_prompts()[0], []
    for _ in range(4):
        use = engine.use(grammar, excluded=seen)
        (answer,) = engine.generate([prompt], params(), grammars=[use])
        assert answer[:-1] not in seen
        assert text_of(facts, answer) in ("red", "green", "blue", "black")
        seen.append(answer[:-1])


def test_the_grammar_begins_after_the_thought(model_dir: Path, facts: TokenizerFacts) -> None:
    grammar = llguidance.compile_regex("[a-c]{3}", facts)
    engine = InProcessEngine(model_dir)
    (free,) = engine.generate([make_prompts()[0]], params(max_tokens=12, ignore_eos=True))
    close = free[5:7]
    assert free.index(close[0]) == 5 and END_OF_TURN not in free[:7]
    use = engine.use(grammar, begin_after=close)
    (answer,) = engine.generate([make_prompts()[0]], params(), grammars=[use])
    assert answer[:7] == free[:7]
    assert re.fullmatch("[a-c]{3}", text_of(facts, answer[7:]))


def test_the_grammar_begins_after_the_second_of_two_marks(
    model_dir: Path, facts: TokenizerFacts
) -> None:
    """Other tokens may lie between them, and the second alone begins nothing."""
    grammar = llguidance.compile_regex("[a-c]{3}", facts)
    engine = InProcessEngine(model_dir)
    (free,) = engine.generate([make_prompts()[0]], params(max_tokens=16, ignore_eos=True))
    first, second = free[5:7], [free[10]]
    assert free.index(first[0]) == 5 and free.index(second[0], 7) == 10 and END_OF_TURN not in free
    for page_size in (16, 4):
        engine = InProcessEngine(model_dir, page_size=page_size)
        use = engine.use(grammar, begin_after=first, then_after=second)
        (answer,) = engine.generate([make_prompts()[0]], params(), grammars=[use])
        assert answer[:11] == free[:11]
        assert re.fullmatch("[a-c]{3}", text_of(facts, answer[11:]))


def test_without_the_opening_of_a_thought_the_grammar_begins_at_once(
    model_dir: Path, facts: TokenizerFacts
) -> None:
    grammar = llguidance.compile_regex("[a-c]{3}", facts)
    engine = InProcessEngine(model_dir)
    (free,) = engine.generate([make_prompts()[0]], params(max_tokens=12, ignore_eos=True))
    close = free[5:7]
    other = next(token for token in range(3, 384) if token not in free)

    def answer(bias: float) -> list[int]:
        use = engine.use(grammar, begin_after=close, opening=[other])
        settings = params(max_tokens=30, logit_bias={other: bias}, repetition_penalty=1.0)
        return engine.generate([make_prompts()[0]], settings, grammars=[use])[0]

    assert re.fullmatch("[a-c]{3}", text_of(facts, answer(-100.0)))
    thinking = answer(100.0)
    assert thinking == [other] * 30  # the thought has no end but its closing tokens


def test_a_thought_can_not_end_the_answer(model_dir: Path, facts: TokenizerFacts) -> None:
    grammar = llguidance.compile_regex("[a-c]{3}", facts)
    engine = InProcessEngine(model_dir)
    never = engine.use(grammar, begin_after=[1, 1, 1, 1])
    biased = params(max_tokens=30, logit_bias={END_OF_TURN: 100.0})
    (answer,) = engine.generate([make_prompts()[0]], biased, grammars=[never])
    assert len(answer) == 30 and END_OF_TURN not in answer


def test_bias_and_min_tokens_do_not_break_the_grammar(
    model_dir: Path, facts: TokenizerFacts
) -> None:
    grammar = llguidance.compile_regex("yes|no", facts)
    for changes in ({"logit_bias": {5: 100.0}}, {"min_tokens": 50}, {"top_k": 1}, {"top_p": 0.01}):
        for answer in answers(InProcessEngine(model_dir), grammar, 4, **changes):
            assert text_of(facts, answer) in ("yes", "no")


# ---------------------------------------------------------------- grammars whose rules a user wrote

RULES = r"""
root ::= "{\"kind\": \"" kind "\", \"calls\": " calls "}"
kind ::= "first-class citizen" | "second-hand clothes"
calls ::= "(" calls? ")" | calls calls | [a-f]{2}
"""


@pytest.fixture
def users_grammar(facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch) -> Grammar:
    """The calls of its matchers are noted to be made by the threads that fill masks."""
    for name in ("_take", "_give_back", "_fill", "_forced", "_may_end"):
        method = getattr(llguidance.LlguidanceMatcher, name)

        def call(
            matcher: llguidance.LlguidanceMatcher, *args: object, _method: Any = method
        ) -> Any:
            assert threading.current_thread().name == "fill-mask"
            return _method(matcher, *args)

        monkeypatch.setattr(llguidance.LlguidanceMatcher, name, call)
    return llguidance.compile_ebnf(RULES, facts)


@pytest.mark.parametrize("device", [CPU, CpuDevice(overlaps=True)], ids=["plain", "overlap"])
def test_only_the_threads_of_masks_call_the_matcher_of_a_users_grammar(
    model_dir: Path, facts: TokenizerFacts, users_grammar: Grammar, device: Device
) -> None:
    """Each of its calls may take seconds. Forced tokens are jumped over all the same."""
    jumping = InProcessEngine(model_dir, device=device)
    given = answers(jumping, users_grammar, max_tokens=60)
    stepping = InProcessEngine(model_dir, device=device, debug_disable_jump_forward=True)
    assert answers(stepping, users_grammar, max_tokens=60) == given
    assert jumping.scheduler.state.counters.forced_tokens > 50
    for answer in given:
        text = b"".join(facts.tokens[token] for token in answer if token != END_OF_TURN).decode()
        start = '{"kind": "(first-class citizen|second-hand clothes)", "calls": [()a-f]*'
        assert re.fullmatch(start.replace("{", r"\{") + r"\}?", text)
        assert text.endswith("}") == (answer[-1] == END_OF_TURN)


def test_a_retracted_answer_goes_on_where_its_users_grammar_was(
    model_dir: Path, users_grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    quiet = answers(InProcessEngine(model_dir, page_size=4), users_grammar, max_tokens=60)
    crowded = InProcessEngine(model_dir, page_size=4, max_total_tokens=132)
    assert answers(crowded, users_grammar, max_tokens=60) == quiet
    assert crowded.scheduler.state.counters.retractions > 0


def test_excluded_paths_are_forbidden_in_a_users_grammar(
    model_dir: Path, users_grammar: Grammar
) -> None:
    engine = InProcessEngine(model_dir)
    use = engine.use(users_grammar)
    (first,) = engine.generate(make_prompts()[:1], [params(max_tokens=60)], grammars=[use])
    again = msgspec.structs.replace(use, excluded=[pack_ids(first)])
    (second,) = engine.generate(make_prompts()[:1], [params(max_tokens=60)], grammars=[again])
    assert second != first
