"""Ollama's API through its own client."""

from typing import Any

import httpx
import ollama
import orjson
import pytest

from radixrt.api.http import events
from radixrt.api.http.endpoints import to_struct
from radixrt.api.ollama.translation import ChatRequest, chat_of
from radixrt.base.errors import RequestError
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_chat import CALL, TOOLS
from tests.servers import samples

HELLO = [{"role": "user", "content": "hi"}]
MANY: Any = {"num_predict": 300}


@pytest.fixture
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(server.url)


def test_a_chat_answer_arrives_whole(client: ollama.Client) -> None:
    answer = client.chat("tiny:latest", HELLO)
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello world")
    assert (answer.done, answer.done_reason, answer.load_duration) == (True, "stop", 0)
    assert answer.eval_count and answer.prompt_eval_count and answer.total_duration is not None


def test_a_whole_answer_does_not_count_as_a_client_that_left(start_server: StartServer) -> None:
    server = start_server()
    server.answer_with("Hello world")
    ollama.Client(server.url).chat("tiny", HELLO)
    counted = samples(server.http.get("/metrics").text)
    outcomes = {labels: n for (name, labels), n in counted.items() if "answers_total" in name}
    assert outcomes == {(("outcome", "stop"),): 1}


@pytest.mark.parametrize("text", ["Hello world", f"Well.\n{CALL}\n{CALL}"])
def test_a_stream_has_the_same_parts(
    client: ollama.Client, server: RunningServer, text: str
) -> None:
    server.answer_with(text)
    whole = client.chat("tiny", HELLO, tools=TOOLS, options=MANY)
    parts = list(client.chat("tiny", HELLO, tools=TOOLS, stream=True, options=MANY))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part.message.content for part in parts) == whole.message.content
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == list(whole.message.tool_calls or ())
    assert parts[-1].eval_count == whole.eval_count
    if CALL in text:
        assert [call.function.arguments for call in calls] == [{"city": "Paris"}] * 2


@pytest.mark.parametrize("in_message", [True, False])
def test_a_pause_is_filled_with_objects_that_add_nothing(
    client: ollama.Client,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    in_message: bool,
) -> None:
    """As while a new engine starts."""
    monkeypatch.setattr(events, "COMMENT_EVERY_S", 0.05)
    server.answer_with("the cat sat on the mat")
    server.scheduler.step_s = 0.2
    stream = client.chat("tiny", HELLO, stream=True) if in_message else client.generate("tiny", "hi", stream=True)  # fmt: skip
    parts = [next(stream)]
    server.scheduler.paused.set()
    while [text_of(part) for part in parts[-3:]] != ["", "", ""]:
        parts.append(next(stream))
    server.scheduler.step_s = 0.0
    server.scheduler.paused.clear()
    parts += stream
    assert "".join(map(text_of, parts)) == "the cat sat on the mat"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    fillers = [part for part in parts[:-1] if not text_of(part)]
    assert len(fillers) >= 3 and {part.model for part in fillers} == {"tiny"}
    if in_message:
        assert {part.message.role for part in fillers} == {"assistant"}


def text_of(part: Any) -> str:
    text = part.message.content if isinstance(part, ollama.ChatResponse) else part.response
    assert isinstance(text, str)
    return text


def test_a_prompt_is_put_into_the_template_unless_it_is_raw(
    client: ollama.Client, server: RunningServer
) -> None:
    answer = client.generate("tiny", "hi", system="Be short.")
    assert answer.response == "Hello world"
    chat = [{"role": "system", "content": "Be short."}, *HELLO]
    assert answer.prompt_eval_count == client.chat("tiny", chat).prompt_eval_count
    raw = client.generate("tiny", "hi", raw=True)
    assert raw.response == "Hello world"
    assert raw.prompt_eval_count == len(server.vocabulary.encode("hi", add_special_tokens=True))
    streamed = list(client.generate("tiny", "hi", stream=True))
    assert "".join(part.response for part in streamed) == "Hello world"


def test_reasoning_is_apart(start_server: StartServer) -> None:
    server = start_server(reasoning_parser="qwen3")
    server.answer_with("<think>\nA greeting.\n</think>\n\nHello")
    message = ollama.Client(server.url).chat("tiny", HELLO, think=True).message
    assert (message.thinking.strip(), message.content) == ("A greeting.", "Hello")
    capabilities = ollama.Client(server.url).show("tiny").capabilities
    assert "thinking" in capabilities


def test_a_format_is_a_constraint(client: ollama.Client, server: RunningServer) -> None:
    server.answer_with('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for wanted in ("json", schema):
        answer = client.chat("tiny", HELLO, format=wanted, options=MANY)
        assert orjson.loads(answer.message.content) == {"a": 1}
        assert server.scheduler.requests[-1].grammar is not None


def test_options_are_sampling_settings() -> None:
    options = {"num_predict": -1, "repeat_penalty": 1.1, "temperature": 0.5, "num_ctx": 4096}
    chat = translated(options=options, keep_alive="1h30m", think="low")
    assert (chat.max_tokens, chat.repetition_penalty, chat.temperature) == (None, 1.1, 0.5)
    assert (chat.cache.retain, chat.cache.ttl_s) == ("high", 5400.0)
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == ("low", {"enable_thinking": True})
    assert translated(keep_alive=0).cache.retain == "none"
    assert translated(keep_alive="-1").cache.ttl_s is None
    assert translated(options={"num_predict": 7}).max_tokens == 7


def test_results_of_tools_keep_their_names() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    history = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "weather", "content": "rain"}]  # fmt: skip
    _, turn, result = translated(messages=history).messages
    assert turn.tool_calls[0]["function"] == {"name": "weather", "arguments": '{"city":"Paris"}'}
    assert (result.role, result.name, result.content) == ("tool", "weather", "rain")


def translated(**fields: Any) -> Any:
    return chat_of(to_struct({"messages": HELLO} | fields, ChatRequest))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"format": "xml"}, "format"),
        ({"messages": [{"role": "user", "images": [""]}]}, "messages[0].images[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_errors_name_the_place(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        translated(**wrong)
    assert error.value.param == param


def test_models_are_described(client: ollama.Client, server: RunningServer) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    assert [model.model for model in client.ps().models] == ["tiny"]
    shown = client.show("tiny:latest")
    assert "tools" in shown.capabilities and "thinking" not in shown.capabilities
    assert shown.modelinfo["FakeForCausalLM.context_length"] == 512
    assert client.chat("tiny", []).done_reason == "load"
    assert client.generate("tiny").done_reason == "load"
    assert client.pull("tiny").status == "success"
    with pytest.raises(ollama.ResponseError, match="not served here"):
        client.pull("other")
    with server.http as http:
        assert http.get("/api/version").json()["version"]


def test_errors_have_ollamas_form(client: ollama.Client, server: RunningServer) -> None:
    with pytest.raises(ollama.ResponseError, match="other") as unknown:
        client.chat("other", HELLO)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="FIM"):
        client.generate("tiny", "hi", suffix="end")
    for fields in ({"tools": TOOLS}, {"tool_choice": "required"}):
        answer = server.http.post("/api/generate", json={"model": "tiny", "prompt": "hi", **fields})
        assert answer.status_code == 400 and "/api/chat" in answer.json()["error"]
    for fields in ({"tools": []}, {"tools": None, "tool_choice": "auto"}):
        body = {"model": "tiny", "prompt": "hi", "stream": False, **fields}
        assert server.http.post("/api/generate", json=body).status_code == 200
    with pytest.raises(ollama.ResponseError) as embedding:
        client.embed("tiny", "hi")
    assert embedding.value.status_code == 400


def test_curl_needs_no_content_type(server: RunningServer) -> None:
    body = orjson.dumps({"model": "tiny", "prompt": "hi"})
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = httpx.post(f"{server.url}/api/generate", content=body, headers=form)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [orjson.loads(line) for line in response.text.splitlines()]
    assert "".join(line["response"] for line in lines) == "Hello world" and lines[-1]["done"]
