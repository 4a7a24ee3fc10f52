"""Arguments of strict tools are checked like any value: a scripted model writes wrong ones, and the
client gets right ones."""

import json
from typing import Any

import openai
import pytest

from radixrt.constrained.tool_calls import Tool
from radixrt.messages.ids import unpack_ids
from radixrt.messages.sequences import SequenceRequest
from radixrt.parsers.tool_calls.registry import FORMATS
from tests.api.conftest import RunningServer, StartServer

PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "save", "parameters": PARAMETERS, "strict": True},
}
WRONG, RIGHT = '{"name": "x", "tags": [4, 4]}', '{"name": "x", "tags": [4, 5]}'
ONE_BY_ONE = {
    "qwen3_coder": "<parameter=name>\nx\n</parameter>\n<parameter=tags>\n{}\n</parameter>\n",
    "minimax_m2": '<parameter name="name">x</parameter>\n<parameter name="tags">{}</parameter>\n',
    "pythonic": "name='x', tags={}",
    "functiongemma": "name:<escape>x<escape>,tags:{}",
}
"""The arguments in the formats that write each parameter by itself, with a place for the tags."""
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=["hermes", "llama3_json", *ONE_BY_ONE])
def name(request: pytest.FixtureRequest) -> str:
    """Of the format of calls."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(name: str, start_server: StartServer) -> RunningServer:
    return start_server(tool_call_parser=name)


@pytest.fixture(scope="module")
def wrong(name: str) -> str:
    return answer_of(name, WRONG)


@pytest.fixture(scope="module")
def right(name: str) -> str:
    return answer_of(name, RIGHT)


def answer_of(name: str, *arguments: str) -> str:
    """The text of calls."""
    written = FORMATS[name]
    tag = written.tag(Tool.from_schema("save", PARAMETERS, True, "t"))
    opening, closing = written.lists[0] if written.lists else ("", "")
    calls = []
    for text in arguments:
        if name in ONE_BY_ONE:
            text = ONE_BY_ONE[name].format(json.dumps(json.loads(text)["tags"]))
        calls.append(tag.begin + text + tag.end)
    return opening + written.separator.join(calls) + closing


def script(server: RunningServer, first: str, then: str) -> None:
    """The model writes ``first``; after each value that was taken back it goes on as ``then`` does,
    a token a character."""

    def ids(text: str) -> list[int]:
        vocabulary = server.vocabulary
        return [i for c in text for i in vocabulary.encode(c, add_special_tokens=False)]

    def answer(request: SequenceRequest) -> list[int]:
        if not request.num_output:
            return [*ids(first), 1]
        kept = unpack_ids(request.token_ids).tolist()[-request.num_output :]
        whole = ids(then)
        assert kept == whole[: len(kept)]
        return [*whole[len(kept) :], 1]

    server.scheduler.requests.clear()
    server.scheduler.script = answer


def create(server: RunningServer, **fields: Any) -> Any:
    return server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], max_tokens=400, **fields
    )


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_with_a_wrong_value_is_taken_back(
    server: RunningServer, name: str, wrong: str, right: str, choice: str
) -> None:
    text = "I save it." if choice == "auto" and not FORMATS[name].begins_answer else ""
    script(server, text + wrong, text + right)
    answer = create(server, tool_choice=choice)
    (made,) = answer.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == json.loads(RIGHT)
    assert answer.usage.structured_output_retries == 1
    first, again = server.scheduler.requests
    assert first.num_output == 0 < again.num_output and again.grammar.excluded
    assert (answer.choices[0].message.content or "") == text


def test_the_second_call_is_checked_too(server: RunningServer, name: str) -> None:
    script(server, answer_of(name, RIGHT, WRONG), answer_of(name, RIGHT, RIGHT))
    made = create(server, tool_choice="required").choices[0].message.tool_calls
    assert [json.loads(each.function.arguments) for each in made] == [json.loads(RIGHT)] * 2
    assert len(server.scheduler.requests) == 2


def test_a_stream_sends_a_checked_value_only_when_it_has_passed(
    server: RunningServer, name: str, wrong: str, right: str
) -> None:
    script(server, wrong, right)
    stream = create(server, tool_choice="required", stream=True)
    deltas = [d for chunk in stream for d in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "save"
    pieces = [delta.function.arguments or "" for delta in deltas]
    assert "".join(pieces) == RIGHT
    sends_whole_values = name in ("pythonic", "functiongemma")
    assert '"name": "x"' in "".join(pieces[:-1]) and len(pieces) > 3 - sends_whole_values


def test_a_value_that_never_passes_is_a_422_that_names_the_tool(
    server: RunningServer, wrong: str
) -> None:
    script(server, wrong, wrong)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        create(server, tool_choice="required")
    assert caught.value.code == "structured_output_failed"
    assert "uniqueItems" in caught.value.message and "save" in caught.value.message


def test_tools_that_are_not_strict_are_not_checked(
    server: RunningServer, wrong: str, right: str
) -> None:
    script(server, wrong, right)
    loose = {**TOOL, "function": {**TOOL["function"], "strict": False}}  # type: ignore[dict-item]
    answer = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[loose], tool_choice="required", max_tokens=400
    )
    assert answer.choices[0].message.tool_calls[0].function.arguments == WRONG
    (lost,) = answer.choices[0].structured_output["unenforced"]
    assert lost["pointer"] == "/properties/tags/uniqueItems"
