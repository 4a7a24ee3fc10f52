"""Custom tools in chat completions and Responses, through the openai client."""

import json
from typing import Any

import openai
import pytest

from radixrt.api.http.endpoints import to_struct
from radixrt.api.openai_responses.translation import ResponsesRequest, to_chat
from radixrt.api.requests.prompts import chat_prompt
from radixrt.api.requests.protocol import ChatCompletionRequest
from radixrt.api.requests.tools import CustomTool
from radixrt.constrained.constraint import Lark
from radixrt.messages.ids import unpack_ids
from tests.api.conftest import RunningServer
from tests.constrained.test_custom_tools import APPLY_PATCH, PATCH

HELLO: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}},
    },
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
ITEM_TOOL: Any = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH},
}
BODY = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
CALL = f"<tool_call>\n{BODY}\n</tool_call>"
OTHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_a_chat_gets_the_text_of_the_call(server: RunningServer) -> None:
    server.answer_with(f"{CALL}\n{OTHER}")
    asked: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL, WEATHER], "max_tokens": 400}
    choice = server.openai.chat.completions.create(**asked).choices[0]
    call, other = choice.message.tool_calls
    assert (choice.finish_reason, call.type, other.type) == ("tool_calls", "custom", "function")
    assert (call.custom.name, call.custom.input) == ("apply_patch", PATCH)
    assert json.loads(other.function.arguments) == {"city": "Oslo"}
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in server.openai.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            pieces[piece.index].append(piece)
    first, *rest = pieces[0]
    assert (first.type, first.custom["name"]) == ("custom", "apply_patch") and first.id
    assert len(rest) > 10
    assert "".join(piece.custom["input"] for piece in pieces[0]) == PATCH
    assert "".join(piece.function.arguments for piece in pieces[1]) == '{"city": "Oslo"}'


def test_the_template_sees_a_function_with_one_string() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": "a\nb"}}
    history = [*HELLO, {"role": "assistant", "content": [], "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "Done."}]  # fmt: skip
    chat = to_struct({"messages": history, "tools": [TOOL]}, ChatCompletionRequest)
    items = [
        *HELLO,
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
    ]
    tool = {**ITEM_TOOL, "description": "Edits files."}
    translated = to_chat(to_struct({"input": items, "tools": [tool]}, ResponsesRequest))
    first, second = (chat_prompt(fields, fields.messages, []) for fields in (chat, translated))
    assert (first.messages, first.tools) == (second.messages, second.tools)
    (shown,) = first.messages[1]["tool_calls"]
    function = {"name": "apply_patch", "arguments": {"input": "a\nb"}}
    assert shown == {"id": "c1", "type": "function", "function": function}
    (offered,) = first.tools or ()
    (text,) = offered["function"]["parameters"]["properties"].values()
    assert (offered["type"], offered["function"]["description"]) == ("function", "Edits files.")
    assert text["type"] == "string" and APPLY_PATCH in text["description"]


def test_a_response_streams_the_text(server: RunningServer) -> None:
    server.answer_with(CALL)
    asked: Any = {"model": "tiny", "input": "hi", "tools": [ITEM_TOOL], "max_output_tokens": 400}
    (item,) = server.openai.responses.create(**asked).output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCH)
    with server.openai.responses.stream(**asked) as stream:
        events = [*stream]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[2:] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    added, done = (next(e.item for e in events if e.type == f"response.output_item.{end}") for end in ("added", "done"))  # fmt: skip
    assert (added.input, added.type, done.input) == ("", "custom_tool_call", PATCH)
    deltas = [e for e in events if e.type.endswith("input.delta")]
    assert "".join(e.delta for e in deltas) == PATCH and {e.item_id for e in deltas} == {added.id}
    assert next(e.input for e in events if e.type.endswith("input.done")) == PATCH


def test_a_stored_response_goes_on_behind_its_call(server: RunningServer) -> None:
    server.answer_with(CALL)
    tools = [ITEM_TOOL]
    first = server.openai.responses.create(
        model="tiny", input="hi", tools=tools, max_output_tokens=400
    )
    output = {
        "type": "custom_tool_call_output",
        "call_id": first.output[0].call_id,
        "output": "Done.",
    }
    server.openai.responses.create(
        model="tiny", input=[output], tools=tools, previous_response_id=first.id
    )
    before, after = (unpack_ids(r.token_ids).tolist() for r in server.scheduler.requests)
    known = [*before, *server.vocabulary.encode(CALL, add_special_tokens=False)]
    assert after[: len(known)] == known


@pytest.mark.parametrize("name", ["apply_patch", None])
def test_the_choice_of_a_custom_tool_holds_the_answer_to_it(
    server: RunningServer, name: str | None
) -> None:
    server.answer_with(CALL)
    named = {"type": "custom", "custom": {"name": "apply_patch"}}
    choice: Any = named if name else {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}  # fmt: skip
    body: Any = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER, TOOL],
        "tool_choice": choice,
    }
    server.openai.chat.completions.create(**body)
    assert server.scheduler.requests[0].grammar is not None
    item_choice: Any = {"type": "custom", "name": "apply_patch"}
    server.openai.responses.create(
        model="tiny", input="hi", tools=[ITEM_TOOL], tool_choice=item_choice
    )
    assert server.scheduler.requests[1].grammar is not None


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_grammar_of_each_syntax_is_the_constraint(syntax: str) -> None:
    grammar = {"syntax": syntax, "definition": "start: /[a-c]+/" if syntax == "lark" else "[a-c]+"}
    custom = {"name": "f", "format": {"type": "grammar", "grammar": grammar}}
    tool = CustomTool.read({"type": "custom", "custom": custom}, "tools[0]").as_tool("tools[0]")
    if syntax == "lark":
        assert tool.grammar == Lark(grammar="start: /[a-c]+/", in_json_string=True)
    else:
        text = json.loads(tool.arguments.schema)["properties"]["input"]
        assert tool.grammar is None and text["pattern"] == "^(?:[a-c]+)$"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": 3}, "tools[0].custom"),
        ({"name": ""}, "tools[0].custom.name"),
        ({"description": 3}, "tools[0].custom.description"),
        ({"format": "text"}, "tools[0].custom.format"),
        ({"format": {"type": "grammar"}}, "tools[0].custom.format"),
        ({"format": {"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "a"}}}, "tools[0].custom.format.grammar.syntax"),
        ({"format": {"type": "grammar", "grammar": {"syntax": "lark"}}}, "tools[0].custom.format.grammar.definition"),
        ({"format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": ""}}}, "tools[0].custom.format.grammar.definition"),
        ({"format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: ~A\nA: /a/"}}}, "tools"),
        ({"format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'root ::= "a"'}}}, "tools[0].custom.format.grammar.definition"),
    ],
)  # fmt: skip
def test_a_malformed_tool_is_refused(server: RunningServer, changes: Any, param: str) -> None:
    tool = {"type": "custom", "custom": {**TOOL["custom"], **changes}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="tiny", messages=HELLO, tools=[tool])
    assert caught.value.body["param"] == param
