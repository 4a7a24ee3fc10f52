"""The Messages API through Anthropic's own client."""

from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import orjson
import pytest

from radixrt.api.anthropic.translation import BILLING_HEADER, MessagesRequest, to_chat
from radixrt.api.http.endpoints import to_struct
from radixrt.base.errors import RequestError
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_chat import CALL

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object"}}


@pytest.fixture
def messages(server: RunningServer) -> anthropic.resources.Messages:
    return client_of(server).messages


@pytest.fixture(scope="module")
def reasoning_server(start_server: StartServer) -> Iterator[RunningServer]:
    yield start_server(reasoning_parser="qwen3")


def client_of(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_an_answer_arrives_whole(messages: anthropic.resources.Messages) -> None:
    answer = messages.create(model="tiny", max_tokens=50, messages=HELLO)
    assert [block.text for block in answer.content] == ["Hello world"]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    assert answer.id.startswith("msg_")


def test_the_count_of_tokens_is_that_of_the_prompt(
    messages: anthropic.resources.Messages, server: RunningServer
) -> None:
    prompt: Any = {"system": "Be short.", "messages": HELLO, "tools": [WEATHER]}
    usage = messages.create(model="tiny", max_tokens=50, **prompt).usage
    assert usage.cache_read_input_tokens == 7
    parts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    assert messages.count_tokens(model="tiny", **prompt).input_tokens == sum(parts)
    assert (
        usage.output_tokens
        == server.http.post("/v1/chat/completions", json={"messages": HELLO}).json()["usage"][
            "completion_tokens"
        ]
    )


@pytest.mark.parametrize(
    "text",
    ["Hello world", "<think>\nA greeting.\n</think>\n\nHello", f"Well.\n{CALL}\n{CALL}", CALL],
)
def test_a_stream_makes_the_same_message(reasoning_server: RunningServer, text: str) -> None:
    reasoning_server.answer_with(text)
    asked: Any = {"model": "tiny", "max_tokens": 300, "messages": HELLO, "tools": [WEATHER]}
    client = client_of(reasoning_server)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert (
        kinds.count("content_block_start")
        == kinds.count("content_block_stop")
        == len(whole.content)
    )
    shown, expected = (_without_ids(message) for message in (streamed, whole))
    assert shown == expected


def _without_ids(message: anthropic.types.Message) -> dict[str, Any]:
    found = message.model_dump(exclude={"id"}, exclude_none=True)
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


def test_reasoning_is_a_thinking_block(reasoning_server: RunningServer) -> None:
    reasoning_server.answer_with("<think>\nA greeting.\n</think>\n\nHello")
    create = client_of(reasoning_server).messages.create
    thought, text = create(model="tiny", max_tokens=200, messages=HELLO).content
    assert thought.thinking.strip() == "A greeting." and thought.signature
    assert text.text.strip() == "Hello"
    omitted: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    (text,) = create(model="tiny", max_tokens=200, messages=HELLO, thinking=omitted).content
    assert text.text.strip() == "Hello"


def test_calls_of_tools_are_blocks(
    messages: anthropic.resources.Messages, server: RunningServer
) -> None:
    server.answer_with(CALL)
    answer = messages.create(model="tiny", max_tokens=200, messages=HELLO, tools=[WEATHER])
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Paris"}) and call.id.startswith(
        "toolu_"
    )


def test_a_stop_sequence_is_named(
    messages: anthropic.resources.Messages, server: RunningServer
) -> None:
    answer = messages.create(model="tiny", max_tokens=50, messages=HELLO, stop_sequences=["wor"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "wor")
    server.answer_endlessly()
    assert messages.create(model="tiny", max_tokens=5, messages=HELLO).stop_reason == "max_tokens"


def test_errors_have_anthropics_form(messages: anthropic.resources.Messages) -> None:
    with pytest.raises(anthropic.NotFoundError) as wrong_model:
        messages.create(model="other", max_tokens=5, messages=HELLO)
    assert wrong_model.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages.create(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi " * 2000}]
        )
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
        messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="leave n out"):
        messages.create(model="tiny", max_tokens=5, messages=HELLO, extra_body={"n": 2})


def test_an_error_in_a_stream_reaches_the_client(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.01
    client = client_of(server)
    with (
        pytest.raises(anthropic.APIStatusError, match="aborted"),
        client.messages.stream(
            model="tiny", max_tokens=400, messages=HELLO, extra_body={"rid": "to-drop"}
        ) as stream,
    ):
        for event in stream:
            if event.type == "text":
                server.http.post("/abort_request", json={"rid": "to-drop"})


def test_fields_of_chat_are_reachable(
    messages: anthropic.resources.Messages, server: RunningServer
) -> None:
    extra = {"logprobs": True, "top_logprobs": 2, "keep": True, "return_times": True}
    answer = messages.create(model="tiny", max_tokens=50, messages=HELLO, extra_body=extra)
    assert len(answer.logprobs["content"]) == answer.usage.output_tokens
    assert answer.kept and answer.times["total_s"] >= 0
    follow_up: Any = {
        "max_tokens": 5,
        "messages": HELLO,
        "extra_body": {"continue_from": answer.id},
    }
    usage = messages.create(model="tiny", **follow_up).usage
    assert usage.input_tokens > answer.usage.input_tokens
    known = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    del follow_up["max_tokens"]
    counted = messages.count_tokens(model="tiny", **follow_up)
    assert counted.input_tokens == usage.input_tokens + known
    server.answer_with('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = messages.create(model="tiny", max_tokens=50, messages=HELLO, output_config=asked)
    assert orjson.loads(answer.content[0].text) == {"a": 1}
    assert server.scheduler.requests[-1].grammar is not None


# ---------------------------------------------------------------- translation


def chat_messages(**fields: Any) -> list[dict[str, Any]]:
    request = to_struct({"max_tokens": 5, "messages": HELLO} | fields, MessagesRequest)
    return [
        {
            name: value
            for name, value in orjson.loads(msgspec.json.encode(message)).items()
            if value is not None
        }
        for message in to_chat(request).messages
    ]


def test_results_of_tools_become_messages() -> None:
    history = [
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"q": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "there"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]  # fmt: skip
    user, assistant, tool, question = chat_messages(messages=history)
    assert user["content"] == "Where?"
    assert assistant["reasoning_content"] == "Look."
    assert assistant["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"q":"é"}'}
    assert (tool["role"], tool["tool_call_id"]) == ("tool", "toolu_1")
    assert tool["content"] == [{"type": "text", "text": "there"}]
    assert (question["role"], question["content"][0]["text"]) == ("user", "So?")


def test_the_billing_header_is_dropped() -> None:
    block = {"type": "text", "text": f"{BILLING_HEADER} cc_version=1; cch=5f3a1;"}
    rules = {"type": "text", "text": "Be short."}
    assert chat_messages(system=[block, rules]) == chat_messages(system=[rules])
    assert chat_messages(system=f"{block['text']}\nBe short.") == chat_messages(system="Be short.")
    assert chat_messages(system=[block]) == chat_messages()


def test_breakpoints_move_with_their_blocks() -> None:
    mark = {"type": "ephemeral"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x", "cache_control": mark}
    (tool,) = chat_messages(messages=[{"role": "user", "content": [result]}])
    assert tool["cache_control"]["type"] == "ephemeral"
    tools = [WEATHER | {"cache_control": mark}, WEATHER | {"name": "time"}]
    fields = to_struct({"max_tokens": 5, "messages": HELLO, "tools": tools}, MessagesRequest)
    assert ["cache_control" in tool for tool in to_chat(fields).tools] == [False, True]


def test_an_answer_of_the_assistant_at_the_end_is_continued() -> None:
    fields = {"max_tokens": 5, "messages": [*HELLO, {"role": "assistant", "content": "The"}]}
    assert to_chat(to_struct(fields, MessagesRequest)).continue_final_message is True


@pytest.mark.parametrize(
    ("choice", "translated", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_the_choice_of_tools(choice: Any, translated: Any, parallel: Any) -> None:
    fields = {"max_tokens": 5, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
    chat = to_chat(to_struct(fields, MessagesRequest))
    assert (chat.tool_choice, chat.parallel_tool_calls) == (translated, parallel)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "audio"}]}, "system[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_errors_name_the_place(wrong: dict[str, Any], param: str) -> None:
    fields = to_struct({"max_tokens": 5, "messages": HELLO} | wrong, MessagesRequest)
    with pytest.raises(RequestError) as error:
        to_chat(fields)
    assert error.value.param == param
