"""The bound of the reasoning in each API: the tokens around the reasoning reach the scheduler with
it."""

from collections.abc import Iterator
from typing import Any

import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import AnyJson, Constraint
from radixrt.messages.requests import GenerateRequest, RequestOptions, TextPrompt
from radixrt.tokenizer.answer.output_parser import OutputParser
from tests.api.conftest import RunningServer, StartServer

HELLO = [{"role": "user", "content": "hi"}]

ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_reasoning_tokens": 64}),
    "responses": ("/v1/responses", {"input": "hi", "max_reasoning_tokens": 64}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 64}}),
    "ollama": ("/api/chat", {"messages": HELLO, "max_reasoning_tokens": 64, "stream": False}),
}  # fmt: skip


@pytest.fixture(scope="module")
def reasoning_server(start_server: StartServer) -> Iterator[RunningServer]:
    yield start_server(reasoning_parser="qwen3")


@pytest.mark.parametrize("name", ASKS)
def test_each_api_bounds_the_reasoning(reasoning_server: RunningServer, name: str) -> None:
    path, body = ASKS[name]
    assert reasoning_server.http.post(path, json={"model": "tiny", **body}).status_code == 200
    sampling = reasoning_server.scheduler.requests[-1].sampling
    own = reasoning_server.vocabulary.encode
    assert sampling.max_reasoning_tokens == 64
    assert sampling.reasoning_opening_ids == tuple(own("<think>", False))
    assert sampling.reasoning_closing_ids == tuple(own("</think>", False))


@pytest.mark.parametrize(
    ("prompt", "parser", "constraint", "opening", "closing"),
    [
        ("hi\n", "qwen3", None, "<think>", "</think>"),
        ("hi\n", "deepseek-r1", None, "", "</think>"),
        ("hi\n", "qwen3", AnyJson(), "<think>", "</think>"),
        ("hi\n<think>\n", "qwen3", None, "", "</think>"),
        ("hi\n<think>\n\n</think>\n\n", "qwen3", None, None, None),
        ("hi\n", "granite", None, None, None),
    ],
)
def test_the_answer_may_begin_before_inside_or_behind_the_reasoning(
    reasoning_server: RunningServer,
    prompt: str,
    parser: str,
    constraint: Constraint | None,
    opening: str | None,
    closing: str | None,
) -> None:
    vocabulary = reasoning_server.vocabulary
    options = RequestOptions(sampling=SamplingParams(max_reasoning_tokens=64))
    request = GenerateRequest(
        request_id="a",
        prompt=TextPrompt(prompt),
        options=options,
        parse_reasoning=parser,
        constraint=constraint,
    )
    found = OutputParser.bounded(request, vocabulary, vocabulary.encode(prompt, False))
    if opening is None or closing is None:
        assert found == SamplingParams()
        return
    assert found.max_reasoning_tokens == 64
    assert found.reasoning_opening_ids == tuple(vocabulary.encode(opening, False))
    assert found.reasoning_closing_ids == tuple(vocabulary.encode(closing, False))


def test_where_there_is_no_reasoning_a_bound_is_refused(
    server: RunningServer, reasoning_server: RunningServer
) -> None:
    path, body = ASKS["chat"]
    completion = ("/v1/completions", {"prompt": "hi", "max_reasoning_tokens": 64})
    for target, (where, fields) in (
        (server, (path, body)),
        (reasoning_server, completion),
        (reasoning_server, (path, body | {"max_reasoning_tokens": 3})),
        (reasoning_server, (path, body | {"max_reasoning_tokens": 0})),
        (reasoning_server, ("/generate", {"text": "hi", "max_reasoning_tokens": 64})),
        (reasoning_server, ("/generate", {"text": "hi", "sampling_params": {"max_reasoning_tokens": 64}})),
    ):  # fmt: skip
        response = target.http.post(where, json={"model": "tiny", **fields})
        assert response.status_code == 400, (where, fields, response.text)
        assert response.json()["error"]["param"].endswith("max_reasoning_tokens")


def test_messages_name_the_budget_as_their_client_does(reasoning_server: RunningServer) -> None:
    path, body = ASKS["messages"]
    body = body | {"thinking": {"type": "enabled", "budget_tokens": 0}}
    error = reasoning_server.http.post(path, json={"model": "tiny", **body}).json()["error"]
    assert error["param"] == "thinking.budget_tokens"
    assert error["message"].startswith("thinking.budget_tokens must be")


def test_messages_take_the_budget_of_a_model_without_reasoning(server: RunningServer) -> None:
    path, body = ASKS["messages"]
    assert server.http.post(path, json={"model": "tiny", **body}).status_code == 200
    assert server.scheduler.requests[-1].sampling.max_reasoning_tokens is None
