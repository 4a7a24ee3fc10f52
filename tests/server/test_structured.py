"""Structured output as users meet it: the openai client, all processes, the built-in model."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.server.test_takeover import process_of
from tests.servers import Server

QUESTION = [
    {"role": "user", "content": "Read: The tower of Zekoru is from 2060. Write it as JSON."}
]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": PARAMETERS, "time": ZONE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


class Building(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    year: int = pydantic.Field(ge=0, le=9999)
    kind: Literal["tower", "bridge"]


BUILDING = {
    "type": "json_schema",
    "json_schema": {"name": "building", "schema": Building.model_json_schema()},
}


@pytest.fixture(scope="module")
def base_url(demo_server: Server) -> str:
    return demo_server.url


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def create(client: openai.OpenAI, **fields: Any) -> Any:
    """Sampled, so that the grammar has something to do."""
    defaults = {"messages": QUESTION, "max_tokens": 300, "temperature": 1.0, "seed": 7}
    return client.chat.completions.create(model="demo", **(defaults | fields))


def check_call(call: Any, names: set[str]) -> None:
    assert call.function.name in names
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_pydantic_model_comes_back_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=Building, max_tokens=200, temperature=0
    )
    assert answer.choices[0].message.parsed == Building(name="Zekoru", year=2060, kind="tower")


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_of_several_satisfies_the_schema(client: openai.OpenAI, stream: bool) -> None:
    answer = create(client, response_format=BUILDING, n=8, stream=stream)
    texts, reasons = [""] * 8, [""] * 8
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
            reasons[choice.index] = choice.finish_reason
    assert set(reasons) == {"stop"}
    for text in texts:
        Building.model_validate_json(text)
        assert list(json.loads(text))[:3] == ["name", "year", "kind"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"[A-Z]{2}-\d{4}"}, r"[A-Z]{2}-\d{4}"),
        ({"regex": "(ab|c){3,5}"}, "(ab|c){3,5}"),
        ({"guided_choice": ["tower of Zekoru", "a bridge"]}, "tower of Zekoru|a bridge"),
        ({"ebnf": 'root ::= "<" inner ">"\ninner ::= "a" | "(" inner ")"'}, r"<\(*a\)*>"),
        ({"guided_grammar": 'start: "x" DIGITS\nDIGITS: /[0-9]{1,5}/'}, "x[0-9]{1,5}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        (
            {"structural_tag": {"format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</n>"}}},
            "<n>[0-9]{3}</n>",
        ),
        (
            {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"enum": [1, 2]}}, {"type": "regex", "pattern": "[ab]"}]}, {"type": "repeat", "content": {"type": "const_string", "value": ";"}, "min": 1, "max": 2}]}}},
            "n=[12ab];;?",
        ),
    ],
)  # fmt: skip
def test_text_of_a_given_form(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    choices = create(client, extra_body=fields, n=4).choices
    for choice in choices:
        assert choice.finish_reason == "length" or re.fullmatch(pattern, choice.message.content)
    assert any(choice.finish_reason == "stop" for choice in choices)


def test_a_completion_and_a_native_answer_can_be_held_too(
    client: openai.OpenAI, base_url: str
) -> None:
    answer = client.completions.create(
        model="demo", prompt="The year is", extra_body={"guided_regex": "[12][0-9]{3}"}
    )
    assert re.fullmatch("[12][0-9]{3}", answer.choices[0].text)
    ask = {"text": "The year is", "sampling_params": {"json_schema": '{"enum": [1, 2]}'}}
    assert httpx.post(f"{base_url}/generate", json=ask, timeout=30).json()["text"] in ("1", "2")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "time"}, 1),
        ({"tool_choice": TOOLS[1] | {"function": {"name": "time"}}}, {"time"}, 1),
        ({"tool_choice": "required"}, {"weather", "time"}, 100),
    ],
)
def test_forced_calls_satisfy_their_schemas(
    client: openai.OpenAI, fields: dict[str, Any], names: set[str], most: int, seed: int
) -> None:
    choice = create(client, tools=TOOLS, seed=seed, temperature=1.5, **fields).choices[0]
    if choice.finish_reason == "length":
        assert most > 1
        return
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert 1 <= len(choice.message.tool_calls) <= most
    for call in choice.message.tool_calls:
        check_call(call, names)


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_is_called_in_auto_mode_is_a_tool(client: openai.OpenAI, stream: bool) -> None:
    """The trigger is in the prompt, so that calls are likely; free text may come as well."""
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    if not stream:
        for choice in create(client, messages=messages, tools=TOOLS, n=8).choices:
            for call in choice.message.tool_calls or []:
                check_call(call, set(SCHEMAS))
        return
    names: dict[tuple[int, int], str] = {}
    arguments: dict[tuple[int, int], str] = {}
    for chunk in create(client, messages=messages, tools=TOOLS, tool_choice="required", n=4, stream=True, parallel_tool_calls=False):  # fmt: skip
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                key = choice.index, call.index
                names.setdefault(key, call.function.name or "")
                arguments[key] = arguments.get(key, "") + (call.function.arguments or "")
    assert set(names) == {(index, 0) for index in range(4)}
    for key, name in names.items():
        jsonschema.validate(json.loads(arguments[key]), SCHEMAS[name])


def test_either_a_call_or_an_answer_of_the_schema(client: openai.OpenAI) -> None:
    kinds = set()
    for choice in create(
        client, tools=TOOLS, response_format=BUILDING, n=16, temperature=2
    ).choices:
        if choice.message.tool_calls:
            (call,) = choice.message.tool_calls
            check_call(call, set(SCHEMAS))
            assert not choice.message.content
        elif choice.finish_reason == "stop":
            Building.model_validate_json(choice.message.content)
        kinds.add(choice.finish_reason)
    assert kinds <= {"stop", "tool_calls", "length"} and kinds - {"length"}


def test_what_no_grammar_can_express_is_checked(client: openai.OpenAI) -> None:
    schema = {
        "type": "array",
        "items": {"enum": [1, 2, 3]},
        "uniqueItems": True,
        "minItems": 3,
        "maxItems": 3,
    }
    held = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    for choice in create(client, response_format=held, n=6).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_best_effort_says_what_was_not_enforced_and_strict_tools_are_checked(
    client: openai.OpenAI,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3, "uniqueItems": True}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    choice = create(client, tools=[tool], **fields).choices[0]
    (lost,) = choice.structured_output["unenforced"]
    assert (lost["keyword"], lost["pointer"]) == ("uniqueItems", "/properties/a/uniqueItems")
    tool["function"]["strict"] = True  # type: ignore[index]
    choice = create(client, tools=[tool], **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), schema)


def test_stop_strings_and_grammar_together(client: openai.OpenAI) -> None:
    choice = create(client, extra_body={"regex": "(a|b|stop)+"}, stop="stop").choices[0]
    assert choice.finish_reason in ("stop", "length")
    assert re.fullmatch("(a|b)*", choice.message.content)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(token): -100 for token in range(0, 300)}},
        {"extra_body": {"min_tokens": 40, "regex": "[ab]{3}"}},
        {"presence_penalty": 2, "frequency_penalty": 2},
        {"logprobs": True, "top_logprobs": 3},
    ],
)
def test_the_grammar_wins_over_other_settings(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    fields = {"extra_body": {"regex": "[ab]{3}"}} | fields
    choice = create(client, **fields).choices[0]
    assert choice.finish_reason == "stop" and re.fullmatch("[ab]{3}", choice.message.content)


def test_errors_come_before_anything_runs(client: openai.OpenAI, base_url: str) -> None:
    for fields in (
        {"extra_body": {"regex": "("}},
        {"extra_body": {"ebnf": "root ::= ("}},
        {"extra_body": {"guided_grammar": "start: missing"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "https://example.com/s"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        {"extra_body": {"structural_tag": {"structures": [], "triggers": []}}},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            create(client, **fields)
        assert error.value.param, error.value
    assert httpx.get(f"{base_url}/health").status_code == 200


HANGING = [
    {"guided_grammar": 'root ::= "a" root'},
    {"guided_grammar": 'root ::= "x" | other\nother ::= "b" other'},
    {"response_format": {"type": "grammar", "syntax": "lark", "grammar": 'start: "a" start'}},
]
ENORMOUS = (
    "root ::= a0\n" + "\n".join(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(16)) + '\na16 ::= "a"'
)


def test_grammars_that_hung_the_worker_delay_no_other_stream(
    base_url: str, demo_server: Server
) -> None:
    """Nor do they cost the worker much, whatever the processes that compile take from the
    machine."""
    worker = process_of(demo_server, "worker")
    body = {
        "prompt": "Once",
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
        "speculation": False,
    }

    def stream() -> float:
        """The worker's CPU seconds until its end."""
        begin = sum(worker.cpu_times()[:2])
        with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=60) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("data")]
        assert len(events) > 100 and events[-1] == "data: [DONE]"
        return sum(worker.cpu_times()[:2]) - begin

    def attack(fields: dict[str, Any]) -> int:
        asked = {"prompt": "x", "max_tokens": 20, **fields}
        return httpx.post(f"{base_url}/v1/completions", json=asked, timeout=60).status_code

    alone = stream()
    with ThreadPoolExecutor() as threads:
        watched = threads.submit(stream)
        refused = list(threads.map(attack, HANGING * 2))
        taken = attack({"guided_grammar": ENORMOUS})
        beside = watched.result()
    assert (refused, taken) == ([400] * 6, 200)
    assert beside < 5 * alone
