"""Every field that can hold a constraint, the tools and the thought, through HTTP."""

import argparse
import json
from typing import Any

import msgspec
import pytest

from radixrt.api.requests.constraint import AskedConstraint, asked_constraint
from radixrt.api.requests.protocol import ChatCompletionRequest, ConstraintFields
from radixrt.api.requests.tools import tool_constraint
from radixrt.api.responses import Usage, structured_extras
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.cli.config_flags import add_arguments, config_from_arguments
from radixrt.constrained.constraint import (
    AnyJson,
    Choice,
    Constraint,
    Ebnf,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    Tag,
)
from radixrt.constrained.grammar import Unenforced
from radixrt.messages.answers import AnswerChunk, AnswerReport
from radixrt.parsers.tool_calls.registry import FORMATS
from tests.api.conftest import RunningServer, StartServer

HELLO = [{"role": "user", "content": "hi"}]
CHAT = {"messages": HELLO}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
HELD = JsonSchema(schema=json.dumps(SCHEMA))
ANY_ORDER = JsonSchema(schema=json.dumps(SCHEMA), any_order=True)
GBNF = 'root ::= "a"'
STRUCTURAL = {
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}
STRUCTURAL_HELD = StructuralTag(
    tags=(Tag(begin="<a>", content=HELD, end="</a>"),), triggers=("<a",)
)
CONFIG = ServerConfig()


def openai_form(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}}  # fmt: skip


def asked(fields: dict[str, Any], config: ServerConfig = CONFIG) -> Constraint | None:
    return asked_constraint(msgspec.convert(fields, ConstraintFields), config).constraint


def post(server: RunningServer, path: str, body: object) -> tuple[int, dict[str, Any]]:
    with server.http as http:
        response = http.post(path, json=body)
    return response.status_code, response.json().get("error", {})


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, AnyJson()),
        (openai_form(), HELD),
        (openai_form(strict=True), HELD),
        (openai_form(strict=None), HELD),
        (openai_form(strict=False), JsonSchema(schema=HELD.schema, strict=False)),
        ({"response_format": {"type": "structural_tag", **STRUCTURAL}}, STRUCTURAL_HELD),
        ({"guided_json": SCHEMA}, HELD),
        ({"guided_json": json.dumps(SCHEMA)}, HELD),
        ({"guided_json": SCHEMA, "property_order": "any"}, ANY_ORDER),
        (openai_form() | {"property_order": "any"}, ANY_ORDER),
        (
            {"json_schema": {"x-property-order": "any"} | SCHEMA, "property_order": "schema"},
            JsonSchema(schema=json.dumps({"x-property-order": "any"} | SCHEMA)),
        ),
        ({"guided_regex": "a+"}, Regex(pattern="a+")),
        ({"guided_choice": ["b", "a"]}, Choice(options=("b", "a"))),
        ({"guided_grammar": GBNF}, Ebnf(grammar=GBNF)),
        ({"guided_grammar": 'start: "a"'}, Lark(grammar='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, HELD),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, Regex(pattern="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Choice(options=("a",))),
        ({"structured_outputs": {"grammar": GBNF}}, Ebnf(grammar=GBNF)),
        ({"structured_outputs": {"json_object": True}}, AnyJson()),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"structural_tag": json.dumps(STRUCTURAL)}}, STRUCTURAL_HELD),
        ({"json_schema": json.dumps(SCHEMA)}, HELD),
        ({"regex": "a+"}, Regex(pattern="a+")),
        ({"ebnf": GBNF}, Ebnf(grammar=GBNF)),
        ({"grammar": GBNF}, Ebnf(grammar=GBNF)),
        ({"grammar": ""}, None),
        ({"structural_tag": json.dumps(STRUCTURAL)}, STRUCTURAL_HELD),
        ({"regex": "a", "guided_decoding_backend": "auto"}, Regex(pattern="a")),
    ],
)
def test_every_field_becomes_its_constraint(
    fields: dict[str, Any], constraint: Constraint | None
) -> None:
    assert asked(fields) == constraint


BAD = [
    ({"response_format": {}}, "response_format.type", "must be text"),
    ({"response_format": {"type": 5}}, "response_format.type", "must be text"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "'schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    (openai_form(strict="no"), "response_format.json_schema.strict", "boolean"),
    (openai_form(schema=5), "response_format.json_schema.schema", "integer"),
    (openai_form(stritc=True), "response_format.json_schema", "'stritc'"),
    ({"guided_json": 5}, "guided_json", "object"),
    ({"guided_json": SCHEMA, "property_order": "all"}, "property_order", '"any" or "schema"'),
    ({"regex": "a", "property_order": "any"}, "property_order", "JSON schema"),
    ({"guided_json": {"x-property-order": 1}}, "guided_json.x-property-order", "schema"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_regex": ["a"]}, "guided_regex", "string"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]", "string"),
    ({"regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend", "auto"),
    (
        {"json_schema": {}, "guided_whitespace_pattern": " *"},
        "guided_whitespace_pattern",
        "flexible",
    ),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "exclude"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "leave it out"),
    (
        {"structured_outputs": {"json_object": "yes"}},
        "structured_outputs.json_object",
        "boolean",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "additionalProperties",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "compact",
    ),
    ({"regex": "a", "ebnf": GBNF}, "ebnf", "regex and ebnf exclude"),
    (openai_form() | {"guided_json": SCHEMA}, "guided_json", "exclude"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "exclude"),
    ({"structural_tag": {}}, "structural_tag", "format"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_not_clear_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body = (CHAT if "chat" in path else {"prompt": "hi"}) | fields
    status, error = post(server, path, body)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize("name", ["fsm", "outlines"])
def test_the_finite_state_machine_is_also_called_outlines(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = config_from_arguments(parser.parse_args(["--grammar-backend", name]))
    config = ServerConfig(grammar_backend=name).validate()  # type: ignore[arg-type]
    assert given.grammar_backend == config.grammar_backend == "fsm"
    fields = ConstraintFields(regex="a", guided_decoding_backend=name)
    assert asked_constraint(fields, config).constraint == Regex(pattern="a")


def test_what_asks_for_what_happens_anyway_is_fine() -> None:
    compact = ServerConfig(grammar_whitespace="compact", grammar_backend="llguidance")
    options = {"disable_any_whitespace": True, "whitespace_pattern": ""}
    assert asked({"structured_outputs": {"json": SCHEMA, **options}}, compact) == HELD
    same = {"guided_decoding_backend": "guidance", "guided_whitespace_pattern": ""}
    assert asked({"guided_json": SCHEMA, **same}, compact) == HELD


@pytest.mark.parametrize("depth", [300, 480, 2000])
def test_deep_schemas_bring_nothing_down(server: RunningServer, depth: int) -> None:
    schema = '{"not":' * depth + "{}" + "}" * depth
    with server.http as http:
        for field in (f'"guided_json": {schema}', f'"json_schema": {json.dumps(schema)}'):
            content = f'{{"prompt": "hi", {field}}}'
            response = http.post("/v1/completions", content=content)
            assert response.status_code == 400, response.text
    server.answer_with("Hello")
    assert post(server, "/v1/completions", {"prompt": "hi"})[0] == 200


def test_a_grammar_error_names_the_field_that_was_sent(server: RunningServer) -> None:
    for path, body, param in [
        ("/v1/completions", {"prompt": "hi", "regex": "("}, "regex"),
        ("/v1/completions", {"prompt": "hi", "regex": "(", "stream": True}, "regex"),
        ("/v1/chat/completions", CHAT | {"guided_grammar": "start: nope"}, "guided_grammar"),
        ("/generate", {"text": "hi", "sampling_params": {"regex": "("}}, "sampling_params"),
        ("/v1/grammar/compile", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ]:
        status, error = post(server, path, body)
        assert (status, error["param"]) == (400, param)


def test_the_scheduler_gets_the_constraint(server: RunningServer) -> None:
    server.answer_with("yes")
    body = {"prompt": ["a", "b"], "n": 2, "guided_choice": ["yes", "no"]}
    assert post(server, "/v1/completions", body)[0] == 200
    grammars = [request.grammar for request in server.scheduler.requests]
    assert len(grammars) == 4 and grammars[0] is not None
    assert all(grammar == grammars[0] for grammar in grammars)


# ---------------------------------------------------------------- native


def test_native_constraints_stand_in_sampling_params(server: RunningServer) -> None:
    server.answer_with("yes")
    ask = {"text": ["a", "b"], "sampling_params": [{"regex": "yes|no"}, {}]}
    with server.http as http:
        assert http.post("/generate", json=ask).status_code == 200
    held = [request.grammar is not None for request in server.scheduler.requests]
    assert sorted(held) == [False, True]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"sampling_params": {"guided_json": {}}}, "sampling_params.guided_json"),
        ({"sampling_params": {"regex": 5}}, "sampling_params.regex"),
        ({"sampling_params": {"regex": "a", "ebnf": GBNF}}, "sampling_params.ebnf"),
        ({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"sampling_params": {"regex": "a", "ignore_eos": True}}, "sampling_params.ignore_eos"),
        (
            {"sampling_params": {"regex": "a", "max_new_tokens": 0}, "return_logprob": True},
            "sampling_params.max_new_tokens",
        ),
    ],
)
def test_native_constraints_that_are_not_clear(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    status, error = post(server, "/generate", {"text": "hi", **body})
    assert (status, error["param"]) == (400, param)


# ---------------------------------------------------------------- compile


VERDICT = {"ok", "backend", "exact", "checked", "unenforced", "slow", "compile_ms", "mask_ms"}


def test_a_grammar_can_be_compiled_ahead(server: RunningServer) -> None:
    with server.http as http:
        for fields in ({"regex": "[0-9]{4}"}, openai_form(), {"guided_choice": ["a"]}):
            response = http.post("/v1/grammar/compile", json=fields)
            assert response.status_code == 200, response.text
            reply = response.json()
            assert set(reply) == VERDICT and reply["ok"] and reply["exact"]
            assert reply["backend"] in ("llguidance", "fsm")
    assert server.scheduler.requests == []


def test_compiling_ahead_says_what_is_checked_and_what_is_wrong(server: RunningServer) -> None:
    checked = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    wrong = {"type": "integer", "minimum": 2, "maximum": 1}
    with server.http as http:
        reply = http.post("/v1/grammar/compile", json={"guided_json": checked}).json()
        assert reply["ok"] and not reply["exact"] and set(reply) == VERDICT
        (found,) = reply["checked"]
        assert (found["keyword"], found["pointer"]) == ("uniqueItems", "/uniqueItems")
        assert found["message"] and found["advice"]
        response = http.post("/v1/grammar/compile", json={"guided_json": wrong})
        assert response.status_code == 400
        reply = response.json()
        assert set(reply) == VERDICT | {"error"} and not reply["ok"] and not reply["exact"]
        assert reply["error"] | {"message": "", "advice": ""} == {
            "keyword": "schema", "pointer": "", "message": "", "advice": "",
            "type": "invalid_request_error", "param": "guided_json", "code": "grammar",
        }  # fmt: skip
        assert "No value satisfies it" in reply["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"prompt": "a"}])
def test_there_must_be_something_to_compile(server: RunningServer, body: dict[str, Any]) -> None:
    status, error = post(server, "/v1/grammar/compile", body)
    assert status == 400 and "Give a constraint" in error["message"]


# ---------------------------------------------------------------- tools

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
NAMED = {"type": "function", "function": {"name": "time"}}


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def held_by_tools(other: Constraint | None = None, form: str = "hermes", **fields: Any) -> Any:
    body = {"messages": HELLO, "tools": [WEATHER, TIME], **fields}
    wanted = msgspec.convert(body, ChatCompletionRequest)
    content = AskedConstraint(other, asked_constraint(wanted, CONFIG).field)
    return tool_constraint(wanted, FORMATS[form], content).constraint


@pytest.mark.parametrize(
    ("fields", "names", "free_text", "least", "most"),
    [
        ({}, ["weather", "time"], True, 0, None),
        ({"tool_choice": "auto"}, ["weather", "time"], True, 0, None),
        ({"parallel_tool_calls": False}, ["weather", "time"], True, 0, 1),
        ({"tool_choice": "required"}, ["weather", "time"], False, 1, None),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            ["weather", "time"], False, 1, 1,
        ),
        ({"tool_choice": NAMED}, ["time"], False, 1, 1),
        ({"tool_choice": NAMED, "parallel_tool_calls": True}, ["time"], False, 1, None),
        ({"tool_choice": allowed_tools("auto", "time")}, ["time"], True, 0, None),
        ({"tool_choice": allowed_tools("required", "time")}, ["time"], False, 1, None),
        ({"tool_choice": allowed_tools("required", "time", "weather"), "parallel_tool_calls": False},
            ["time", "weather"], False, 1, 1),
    ],
)  # fmt: skip
def test_tool_choice(
    fields: dict[str, Any], names: list[str], free_text: bool, least: int, most: int | None
) -> None:
    constraint = held_by_tools(**fields)
    assert [
        json.loads(tag.begin.split("name")[1][3:].split(",")[0]) for tag in constraint.tags
    ] == names
    assert (constraint.free_text, constraint.min_tags, constraint.max_tags) == (
        free_text,
        least,
        most,
    )


def test_only_strict_tools_must_be_enforced_in_full() -> None:
    contents = [tag.content for tag in held_by_tools().tags]
    assert [content.strict for content in contents] == [False, True]


def test_without_calls_the_other_constraint_stays() -> None:
    assert held_by_tools(HELD, tool_choice="none") == HELD
    assert held_by_tools(HELD, tools=[]) == HELD
    assert held_by_tools(None, tools=None) is None


def test_a_call_that_must_come_overrides_response_format_and_contradicts_other_constraints() -> (
    None
):
    asked = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    assert held_by_tools(HELD, **asked) == held_by_tools(tool_choice="required")
    with pytest.raises(RequestError, match="leave one of them out"):
        held_by_tools(HELD, tool_choice="required", guided_json={"type": "object"})


def test_a_server_that_knows_no_format_of_calls_refuses_tools() -> None:
    wanted = msgspec.convert({"messages": HELLO, "tools": [WEATHER]}, ChatCompletionRequest)
    with pytest.raises(RequestError, match="--tool-call-parser"):
        tool_constraint(wanted, None, AskedConstraint(None, ""))
    wanted.tool_choice = "none"
    assert tool_constraint(wanted, None, AskedConstraint(None, "")).constraint is None


def test_either_a_call_or_json() -> None:
    constraint = held_by_tools(HELD)
    assert constraint.tags[-1] == Tag(begin="", content=HELD, end="")
    assert (constraint.free_text, constraint.min_tags, constraint.max_tags) == (False, 1, 1)
    for other, form, fields in [
        (Regex(pattern="a"), "hermes", {}),
        (HELD, "llama3_json", {}),
        (HELD, "hermes", {"parallel_tool_calls": True}),
    ]:
        with pytest.raises(RequestError):
            held_by_tools(other, form, **fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"tools": [{"function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": None, "tool_choice": "required"}, "tools"),
        ({"tools": None, "tool_choice": NAMED}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": allowed_tools("auto")}, "tool_choice"),
        ({"tool_choice": allowed_tools("none", "time")}, "tool_choice"),
        ({"tool_choice": allowed_tools("auto", "time", "f")}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
    ],
)
def test_tools_that_are_not_clear_are_refused(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    body = CHAT | {"tools": [WEATHER, TIME]} | fields
    status, error = post(server, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, param)


def test_streamed_calls_come_in_pieces(server: RunningServer) -> None:
    calls = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    calls += '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    server.answer_with(calls)
    create = server.openai.chat.completions.create
    stream = create(
        model="tiny", messages=HELLO, tools=[WEATHER, TIME], max_tokens=300, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
    for index, name, arguments in [(0, "time", "{}"), (1, "weather", '{"city": "Paris"}')]:
        pieces = [delta for delta in deltas if delta.index == index]
        assert [piece.function.name for piece in pieces if piece.function.name] == [name]
        assert [bool(piece.id) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert "".join(piece.function.arguments for piece in pieces) == arguments
    assert len(deltas) > 3
    assert not "".join(choice.delta.content for choice in choices)
    assert choices[-1].finish_reason == "tool_calls"


# ---------------------------------------------------------------- values as they are complete


def test_the_openai_client_reads_a_stream_with_values(server: RunningServer) -> None:
    """They are a further field of a choice; the client parses what it knows as always."""
    text = '{\n"b": 12,\n"a": null}'
    server.answer_with(text)
    stream = server.openai.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        max_tokens=100,
        extra_body={"stream_values": True, **openai_form()},
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert choices[-1].finish_reason == "stop"
    told = [event for choice in choices for event in (choice.model_extra or {}).get("values", [])]
    whole = {"b": 12, "a": None}
    assert told == [
        {"event": "value.started", "pointer": "", "type": "object"},
        {"event": "value.completed", "pointer": "/b", "type": "number", "value": 12, "validated": True},
        {"event": "value.completed", "pointer": "/a", "type": "null", "value": None, "validated": True},
        {"event": "value.completed", "pointer": "", "type": "object", "value": whole, "validated": True},
    ]  # fmt: skip


def test_the_openai_client_s_stream_helper_ignores_values(server: RunningServer) -> None:
    server.answer_with('{"b": 12, "a": null}')
    with server.openai.chat.completions.stream(
        model="tiny",
        messages=HELLO,
        max_tokens=100,
        extra_body={"stream_values": True, **openai_form()},
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert message.content == '{"b": 12, "a": null}'


def test_arguments_of_tool_calls_are_told_too(server: RunningServer) -> None:
    server.answer_with(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    )
    body = {**CHAT, "tools": [WEATHER], "tool_choice": "required", "stream": True, "stream_values": True, "max_tokens": 300}  # fmt: skip
    with server.http as http:
        lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told = [event for chunk in chunks for event in chunk["choices"][0].get("values", [])]
    completed = {e["pointer"]: e["value"] for e in told if e["event"] == "value.completed"}
    assert completed == {"/city": "Paris", "": {"city": "Paris"}}
    assert {event["tool_call"] for event in told} == {0}


@pytest.mark.parametrize(
    "fields", [{**openai_form()}, {"stream": True}, {"stream": True, "guided_regex": "a"}]
)
def test_values_need_a_stream_of_json(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {**CHAT, **fields, "stream_values": True}
    status, error = post(server, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "stream_values")


# ---------------------------------------------------------------- the thought


@pytest.fixture(scope="module")
def thinking(start_server: StartServer) -> RunningServer:
    return start_server(reasoning_parser="qwen3")


THOUGHT = "<think>\nLet me see.\n</think>\n\n"


def test_the_thought_comes_apart_from_the_content(thinking: RunningServer) -> None:
    thinking.answer_with(THOUGHT + "Yes.")
    create = thinking.openai.chat.completions.create
    message = create(model="tiny", messages=HELLO, max_tokens=200).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes.")
    stream = create(model="tiny", messages=HELLO, max_tokens=200, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Let me see."
    assert "".join(d.content or "" for d in deltas) == "Yes."


def test_the_thought_can_be_left_out_or_in(thinking: RunningServer) -> None:
    thinking.answer_with(THOUGHT + "Yes.")
    create = thinking.openai.chat.completions.create

    def message(**fields: bool) -> Any:
        return create(model="tiny", messages=HELLO, max_tokens=200, extra_body=fields).choices[0].message  # fmt: skip

    without = message(include_reasoning=False)
    assert without.content == "Yes." and not hasattr(without, "reasoning_content")
    assert message(separate_reasoning=False).content == THOUGHT + "Yes."
    status, error = post(
        thinking, "/v1/chat/completions", CHAT | {"separate_reasoning": False, "regex": "a"}
    )
    assert (status, error["param"]) == (400, "separate_reasoning")


def test_a_constraint_begins_after_the_thought(thinking: RunningServer) -> None:
    thinking.scheduler.requests.clear()
    thinking.answer_with("<think>Hm, </think>yes")
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
    constrained = thinking.openai.chat.completions.create(**body, extra_body={"regex": "yes|no"})
    grammar = thinking.scheduler.requests[-1].grammar
    closing = thinking.vocabulary.encode("</think>", add_special_tokens=False)
    assert grammar is not None
    assert list(memoryview(grammar.begin_after).cast("i")) == closing
    message = constrained.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm,", "yes")


# ---------------------------------------------------------------- responses


def test_what_was_not_enforced_is_reported_with_the_last_chunk() -> None:
    lost = Unenforced(keyword="not", pointer="/not", reason="why")
    complete = AnswerReport(finish_reason="stop", unenforced=(lost,))
    told = {"keyword": "not", "pointer": "/not", "reason": "why"}
    expected = {"structured_output": {"unenforced": [told], "violation": None}}
    assert structured_extras(complete) == expected
    assert structured_extras(msgspec.structs.replace(complete, finish_reason=None)) == {}
    assert structured_extras(msgspec.structs.replace(complete, unenforced=())) == {}


def test_retries_are_in_the_usage() -> None:
    usage = Usage()
    chunk = AnswerChunk(
        request_id="a", index=0, text="", token_ids=b"", report=AnswerReport(prompt_tokens=3)
    )
    usage.add(0, chunk)
    assert "structured_output_retries" not in usage.as_json()
    for index, retries in ((0, 1), (0, 2), (1, 3)):
        report = AnswerReport(prompt_tokens=3, retries=retries)
        usage.add(0, msgspec.structs.replace(chunk, index=index, report=report))
    assert usage.as_json()["structured_output_retries"] == 5
    assert usage.as_json()["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ({"regex": "a"}, "regex"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, "response_format"),
    ],
)
def test_the_field_of_a_constraint(asked: dict[str, Any], field: str) -> None:
    fields = msgspec.convert({"messages": []} | asked, ChatCompletionRequest)
    constraint = asked_constraint(fields, ServerConfig())
    assert tool_constraint(fields, FORMATS["hermes"], constraint).field == field
