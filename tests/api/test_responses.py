"""The Responses API through the openai client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import orjson
import pydantic
import pytest
from openai.resources.responses import Responses

from radixrt.api.http.endpoints import to_struct
from radixrt.api.openai_responses.translation import ResponsesRequest, sealed, to_chat
from radixrt.base.errors import RequestError
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_chat import CALL
from tests.api.test_keys import key_file

THOUGHT = "<think>\nA greeting.\n</think>\n\nHello"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
def responses(server: RunningServer) -> Responses:
    return server.openai.responses


@pytest.fixture(scope="module")
def reasoning_server(start_server: StartServer) -> Iterator[RunningServer]:
    yield start_server(reasoning_parser="qwen3")


def test_a_response_arrives_whole(responses: Responses) -> None:
    response = responses.create(model="tiny", input="hi", metadata={"a": "b"})
    assert response.output_text == "Hello world"
    assert (response.status, response.error, response.metadata) == ("completed", None, {"a": "b"})
    assert response.id.startswith("resp_")
    assert response.usage.input_tokens_details.cached_tokens == 7
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    used = response.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("text", ["Hello world", THOUGHT, f"Well.\n{CALL}\n{CALL}", CALL])
def test_a_stream_makes_the_same_response(
    reasoning_server: RunningServer, text: str, summary: Any
) -> None:
    reasoning_server.answer_with(text)
    asked: Any = {"model": "tiny", "max_output_tokens": 300, "input": "hi", "tools": [WEATHER]}
    asked |= {"reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    whole = reasoning_server.openai.responses.create(**asked)
    with reasoning_server.openai.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == len(whole.output)
    assert _shown(streamed) == _shown(whole)
    for event in events:
        if event.type == "response.output_item.done":
            assert _unparsed(event.item) == _unparsed(streamed.output[event.output_index])
    for kind, item in (("output_text", "message"), ("reasoning_text", "reasoning"), ("function_call_arguments", "function_call")):  # fmt: skip
        deltas = [e for e in events if e.type == f"response.{kind}.delta"]
        done = [e for e in events if e.type == f"response.{kind}.done"]
        ends = [getattr(e, "text", None) or getattr(e, "arguments", "") for e in done]
        assert "".join(e.delta for e in deltas) == "".join(ends)
        assert len(done) in (0, sum(one.type == item for one in whole.output))


def _shown(response: Any) -> dict[str, Any]:
    found = orjson.loads(response.model_dump_json(exclude_none=True))
    for name in ("id", "created_at", "completed_at"):
        del found[name]
    for item in found["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
    found["output"] = [_unparsed(item) for item in found["output"]]
    return found


def _unparsed(item: Any) -> dict[str, Any]:
    """An item without what the client adds to it."""
    found = (
        item if isinstance(item, dict) else orjson.loads(item.model_dump_json(exclude_none=True))
    )
    found.pop("parsed_arguments", None)
    for part in found.get("content", ()):
        part.pop("parsed", None)
    return found


def test_reasoning_is_an_item(reasoning_server: RunningServer) -> None:
    reasoning_server.answer_with(THOUGHT)
    create = reasoning_server.openai.responses.create
    response = create(model="tiny", input="hi", include=["reasoning.encrypted_content"])
    thought, message = response.output
    assert thought.content[0].text.strip() == "A greeting." and thought.summary == []
    assert message.content[0].text == "Hello"
    encode = reasoning_server.vocabulary.encode
    tokens = len(encode(THOUGHT.split("\n\n")[0], add_special_tokens=False))
    assert response.usage.output_tokens_details.reasoning_tokens == tokens
    summarized = create(model="tiny", input="hi", reasoning={"summary": "auto"}).output[0]
    assert summarized.summary[0].text == thought.content[0].text and not summarized.content
    # A client that keeps only the sealed text hands back the same.
    kept = {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "encrypted_content": thought.encrypted_content,
    }
    (turn,) = chat_messages([kept, {"role": "assistant", "content": "Hello"}])
    assert turn["reasoning_content"] == thought.content[0].text


def test_functions_are_called(responses: Responses, server: RunningServer) -> None:
    server.answer_with(CALL)
    response = responses.create(model="tiny", input="hi", tools=[WEATHER, {"type": "web_search"}])
    (call,) = response.output
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "weather",
        '{"city": "Paris"}',
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    follow_up = responses.create(model="tiny", input=[result], previous_response_id=response.id)
    assert follow_up.usage.input_tokens > response.usage.input_tokens
    assert follow_up.previous_response_id == response.id


def test_a_chain_of_responses_has_the_prompt_of_the_whole_conversation(
    responses: Responses,
) -> None:
    first = responses.create(model="tiny", input="hi", instructions="Be short.")
    second = responses.create(model="tiny", input="And?", previous_response_id=first.id, instructions="Be long.")  # fmt: skip
    history = [
        {"role": "user", "content": "hi"},
        *first.output,
        {"role": "user", "content": "And?"},
    ]
    whole = responses.create(model="tiny", input=history, instructions="Be long.")
    assert second.usage.input_tokens == whole.usage.input_tokens
    without = responses.create(model="tiny", input="And?", previous_response_id=first.id)
    assert without.usage.input_tokens < whole.usage.input_tokens


def test_stored_responses_are_retrieved_and_deleted(
    responses: Responses, server: RunningServer
) -> None:
    response = responses.create(model="tiny", input="hi")
    assert responses.retrieve(response.id).model_dump() == response.model_dump()
    responses.delete(response.id)
    for gone in (responses.retrieve, responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(response.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        responses.create(model="tiny", input="hi", previous_response_id=response.id)
    assert unknown.value.code == "previous_response_not_found"
    unstored = responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unstored.id)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
    kept = responses.create(model="tiny", input="hi")
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(kept.id)


def test_a_stored_response_is_its_keys_own(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(api_keys=str(key_file(tmp_path)))
    server.answer_with("Hello")
    alice, bob = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"{name}-key", max_retries=0).responses
        for name in ("alice", "bob")
    )
    kept = alice.create(model="tiny", input="hi")
    assert alice.retrieve(kept.id).output_text == "Hello"
    with pytest.raises(openai.NotFoundError):
        bob.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError):
        bob.create(model="tiny", input="And?", previous_response_id=kept.id)


def test_an_answer_is_parsed(responses: Responses, server: RunningServer) -> None:
    class Sum(pydantic.BaseModel):
        total: int

    server.answer_with('{"total": 4}')
    parsed = responses.parse(model="tiny", input="2+2?", text_format=Sum)
    assert parsed.output_parsed == Sum(total=4)
    assert server.scheduler.requests[-1].grammar is not None


def test_log_probabilities_are_in_the_text(responses: Responses) -> None:
    wanted: Any = ["message.output_text.logprobs"]
    response = responses.create(model="tiny", input="hi", include=wanted, top_logprobs=2)
    (message,) = response.output
    assert len(message.content[0].logprobs) == response.usage.output_tokens


def test_an_answer_that_is_cut_off_is_incomplete(
    responses: Responses, server: RunningServer
) -> None:
    server.answer_endlessly()
    response = responses.create(model="tiny", input="hi", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # fmt: skip
    assert response.output[0].status == "incomplete"


def test_a_stream_that_is_aborted_has_failed(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.01
    extra = {"rid": "to-drop"}
    kinds = []
    with server.openai.responses.create(
        model="tiny", input="hi", max_output_tokens=400, stream=True, extra_body=extra
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                server.http.post("/abort_request", json=extra)
    assert kinds[-1] == "response.failed"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input[0].arguments"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_errors_name_the_place(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        to_chat(to_struct({"input": "hi"} | wrong, ResponsesRequest))
    assert error.value.param == param


@pytest.mark.parametrize(
    "body", [{"background": True}, {"truncation": "auto"}, {"n": 2}, {"input": []}, {}]
)
def test_wrong_requests_are_refused(server: RunningServer, body: dict[str, Any]) -> None:
    fields = ({"input": "hi"} if len(body) and "input" not in body else {}) | body
    response: httpx.Response = server.http.post("/v1/responses", json=fields)
    assert response.status_code == 400 and response.json()["error"]["param"]


def chat_messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chat = to_chat(to_struct({"input": items}, ResponsesRequest))
    messages: list[dict[str, Any]] = orjson.loads(msgspec.json.encode(chat.messages))
    return messages


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": "Where?"},
        {"type": "reasoning", "encrypted_content": sealed("Look."), "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "there"},
        {"type": "web_search_call", "id": "w"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
        {"role": "assistant", "content": "There."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Next."}]},
        {"role": "assistant", "content": "Done."},
    ]
    user, turn, tool, there, done = chat_messages(items)
    assert (user["role"], tool["role"], tool["tool_call_id"]) == ("user", "tool", "c")
    assert (turn["reasoning_content"], turn["content"][0]["text"]) == ("Look.", "I look.")
    assert turn["tool_calls"][0]["function"]["name"] == "find"
    assert (there["reasoning_content"], there["content"][0]["text"]) == ("So.", "There.")
    assert (done["reasoning_content"], done["content"][0]["text"]) == ("Next.", "Done.")
