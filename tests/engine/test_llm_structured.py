"""What a Python program can hold its answers to."""

import json
import math
import re
from typing import Any, Literal

import pydantic
import pytest

from radixrt import LLM, SamplingParams
from radixrt.base.errors import RequestError
from radixrt.constrained.constraint import AnyJson

QUESTION = [
    {"role": "user", "content": "Read: The tower of Zekoru is from 2060. Write it as JSON."}
]
SHORT = SamplingParams(max_tokens=100)


class Building(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    year: int = pydantic.Field(ge=0, le=9999)
    kind: Literal["tower", "bridge"]


@pytest.fixture
def llm(demo_llm: LLM) -> LLM:
    return demo_llm


def test_a_schema_may_be_a_type_a_dict_or_text(llm: LLM) -> None:
    schema = Building.model_json_schema() | {"additionalProperties": False}
    for given in (Building, schema, json.dumps(schema)):
        output = llm.chat(QUESTION, SamplingParams(max_tokens=200, n=2), schema=given)
        for answer in output.answers:
            assert answer.finish_reason == "stop"
            Building.model_validate_json(answer.text)


def test_every_prompt_of_many_is_held(llm: LLM) -> None:
    prompts = ["The year is", "It was in", "In"]
    outputs = llm.generate(prompts, SHORT, regex="[12][0-9]{3}", progress=False)
    assert all(re.fullmatch("[12][0-9]{3}", output.text) for output in outputs)
    outputs = llm.generate(prompts, SHORT, choices=["now", "then"], progress=False)
    assert {output.text for output in outputs} <= {"now", "then"}
    outputs = llm.generate(prompts, SHORT, grammar='root ::= "<" [0-9] ">"', progress=False)
    assert all(re.fullmatch("<[0-9]>", output.text) for output in outputs)


def test_a_stream_is_held_too(llm: LLM) -> None:
    text = "".join(chunk.text for chunk in llm.stream("Hello", SHORT, regex="(ab){2,4}"))
    assert re.fullmatch("(ab){2,4}", text)


def test_any_constraint_can_be_given(llm: LLM) -> None:
    output = llm.generate("{", SamplingParams(max_tokens=30), structured=AnyJson())
    assert output.text.startswith("{")


def test_what_no_grammar_can_express_is_checked(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}  # fmt: skip
    output = llm.generate("a", SamplingParams(max_tokens=100, n=4), schema=schema)
    for answer in output.answers:
        assert answer.finish_reason == "stop" and sorted(json.loads(answer.text)) == [1, 2, 3]


def test_masses_are_those_of_the_tokens_that_stay_when_values_are_generated_again(
    llm: LLM,
) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}  # fmt: skip
    params = SamplingParams(max_tokens=100, n=4, seed=1, kept_mass=True, logprobs=0)
    answers = llm.generate("a", params, schema=schema).answers
    assert any(answer.retries for answer in answers)
    for answer in answers:
        assert answer.kept_mass is not None and answer.logprobs is not None
        assert len(answer.kept_mass) == len(answer.token_ids) == len(answer.logprobs)
        assert answer.log_kept_mass == pytest.approx(sum(map(math.log, answer.kept_mass)))
        for mass, token in zip(answer.kept_mass, answer.logprobs, strict=True):
            assert token.logprob is not None and math.exp(token.logprob) <= mass + 1e-6 <= 1 + 2e-6
    plain = llm.generate("a", SHORT, regex="[ab]{3}")
    assert plain.answers[0].kept_mass is None and plain.answers[0].log_kept_mass is None


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"regexp": "a"}, "no keyword regexp"),
        ({"regex": "a", "choices": ["b"]}, "exclude each other"),
        ({"schema": 5}, "must be a JSON schema"),
        ({"schema": "{"}, "not valid JSON"),
        ({"strict": False}, "strict goes with a schema"),
        ({"structured": "a"}, "structured must be one of"),
        ({"regex": "("}, "regular expression"),
        ({"schema": {"type": "nothing"}}, "nothing"),
    ],
)
def test_what_is_not_clear_is_refused(llm: LLM, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate("a", SHORT, **keywords)
    with pytest.raises(RequestError, match="ignore_eos"):
        llm.generate("a", SamplingParams(max_tokens=5, ignore_eos=True), regex="a")
