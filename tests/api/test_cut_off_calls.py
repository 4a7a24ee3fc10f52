"""A call that ``max_tokens`` cuts off: its beginning is in the answer as a call, and none of it as
text."""

import json
from typing import Any

import pytest

from tests.api.conftest import RunningServer
from tests.api.test_chat import CALL, HELLO, TOOLS

ARGUMENTS = '{"city": "Paris"}'
NAMED = 'weather", "arguments": '
"""The call is shown from here on."""
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def cuts(server: RunningServer) -> list[int]:
    return [*range(1, len(server.vocabulary.encode(CALL, False)), 3)]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_shows_the_beginning_of_a_call(
    server: RunningServer, stream: bool, choice: str
) -> None:
    server.answer_with(CALL)
    shown: list[str] = []
    for most in cuts(server):
        asked: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": most}
        answer = server.openai.chat.completions.create(**asked, tool_choice=choice, stream=stream)
        content, name, arguments, finish = "", "", "", None
        for one in (c.choices[0] for c in answer) if stream else [answer.choices[0]]:
            part = one.delta if stream else one.message
            content += part.content or ""
            for call in part.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = one.finish_reason or finish
        assert finish == "length"
        assert content.strip() in ("", "<tool_call>"[: len(content.strip())])
        assert choice == "auto" or not content.strip()
        assert len(content) < len("<tool_call>")
        assert name in ("", "weather") and ARGUMENTS.startswith(arguments)
        shown.append(name + arguments)
    assert shown == sorted(shown, key=len)
    assert shown[0] == "" and shown[-1] == f"weather{ARGUMENTS}" and len({*shown}) > 4


def test_the_other_apis_show_it_too(server: RunningServer) -> None:
    server.answer_with(CALL)
    most = len(server.vocabulary.encode(CALL.partition("ris")[0], False))
    for stream in (False, True):
        body = {"model": "tiny", "input": "hi", "tools": [FUNCTION], "max_output_tokens": most}
        item = _last(server, "/v1/responses", body, stream, "response")["output"][-1]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")
        assert ARGUMENTS.startswith(item["arguments"]) and len(item["arguments"]) > 10
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    body = {"model": "tiny", "messages": HELLO, "tools": [tool], "max_tokens": most}
    message = server.http.post("/v1/messages", json=body).json()
    assert message["stop_reason"] == "max_tokens"
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    streamed = server.http.post("/v1/messages", json=body | {"stream": True}).text
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [piece["delta"].get("partial_json", "") for piece in pieces if "delta" in piece]
    assert ARGUMENTS.startswith("".join(deltas)) and len("".join(deltas)) > 10
    assert "text_delta" not in streamed
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "options": {"num_predict": most}}
    answer = server.http.post("/api/chat", json=body | {"stream": False}).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("", "length")


def _last(
    server: RunningServer, path: str, body: dict[str, Any], stream: bool, name: str
) -> dict[str, Any]:
    response = server.http.post(path, json=body | {"stream": stream})
    if not stream:
        return dict(response.json())
    last = [line for line in response.text.splitlines() if line.startswith("data: {")][-1]
    return dict(json.loads(last[6:])[name])
