"""Drafts through a whole server: the same answers with and without them, over HTTP, and the counts
of both."""

import json
import os
import re
from typing import Any

import httpx
import pytest

from tests.servers import Server

DOCUMENT = "The owner of Vidur is Noval. The color of Vidur is blue. The owner of Bramol is Teska."
ASK = {
    "messages": [{"role": "user", "content": f"{DOCUMENT} Who is the owner of Bramol?"}],
    "max_tokens": 80,
    "temperature": 0.0,
    "ignore_eos": True,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "owner": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
        "count": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 5000},
    },
    "required": ["owner", "count"],
}


@pytest.fixture
def ask(demo_server: Server) -> Any:
    def post(**fields: Any) -> dict[str, Any]:
        body = {**ASK, **fields}
        response = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    return post


def without_ids(answer: dict[str, Any]) -> Any:
    """The choices; each call of a tool has an id of its own."""
    return json.loads(re.sub(r'"call_[0-9a-f]+"', '""', json.dumps(answer["choices"])))


def drafted(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


TORTURE = bool(os.environ.get("RADIXRT_TORTURE"))
SEEDS = range(63 if TORTURE else 1)
"""Requests of each kind."""
FUNCTION = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
ENDS = {"ignore_eos": False, "temperature": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0, "logprobs": True},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": True},
    "stop": {"stop": ["is", "a"], "n": 2, "temperature": 1.0},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "temperature": 0.8, "frequency_penalty": 0.5},
    "json": {"response_format": {"type": "json_object"}, **ENDS, "logprobs": True},
    "checked": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, **ENDS},
    "tools": {"tools": [FUNCTION], "tool_choice": "required", **ENDS},
    "perhaps tools": {"tools": [FUNCTION], **ENDS, "logprobs": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS if TORTURE else ["stop", "logprobs", "checked", "tools"])
def test_an_answer_is_the_same_with_and_without_drafts(ask: Any, kind: str) -> None:
    """From text, and by the model's head as far as it pays; tests/engine lets heads draft at any
    price."""
    drafters: set[str] = set()
    for seed in SEEDS:
        salt = f"{kind} {seed}"
        question = f"{DOCUMENT} Who is the owner of {('Vidur', 'Bramol')[seed % 2]}? {seed or ''}"
        messages = [{"role": "user", "content": question}]
        fields = {**KINDS[kind], "seed": seed, "messages": messages, "cache_salt": salt}
        plain = ask(**fields, speculation=False)
        assert drafted(plain) == (0, 0)
        assert "drafts" not in plain["usage"]["completion_tokens_details"]
        for number in range(3):  # the first finds how the plain one went on, the last nothing
            own = f"{salt} {number}" if number == 2 else salt
            answer = ask(**fields | {"cache_salt": own})
            assert without_ids(answer) == without_ids(plain)  # and bits of log-probabilities
            assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
            drafters |= answer["usage"]["completion_tokens_details"].get("drafts", {}).keys()
    assert not TORTURE or {"tree", "ngram"} <= drafters


def test_an_answer_that_is_repeated_is_drafted_from_the_tree_of_its_salt(
    ask: Any, demo_server: Server
) -> None:
    first = ask(cache_salt="tree")
    again = ask(cache_salt="tree")
    assert again["choices"] == first["choices"]
    # At any price one token in 31 is drafted, and what was the answer before is right again.
    assert drafted(again)[0] > 0
    from_tree = again["usage"]["completion_tokens_details"]["drafts"]["tree"]
    assert 0 < from_tree["accepted"] <= from_tree["drafted"]
    metrics = httpx.get(f"{demo_server.url}/metrics").text
    assert re.search(r'radixrt_accepted_draft_tokens_total\{drafter="tree"[^}]*\} [1-9]', metrics)


def test_the_drafts_of_an_answer_that_ends_at_a_stop_string_are_counted(ask: Any) -> None:
    whole = ask(cache_salt="stop")["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:6]
    answer = ask(cache_salt="stop", stop=stop)
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert 0 < drafted(answer)[0] <= answer["usage"]["completion_tokens"]


def test_a_prediction_is_drafted_from(ask: Any) -> None:
    expected = ask(speculation=False, cache_salt="first")
    text = expected["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, parts):
        prediction = {"type": "content", "content": content}
        answer = ask(prediction=prediction, cache_salt=f"prediction-{len(content)}")
        assert answer["choices"] == expected["choices"]
        assert drafted(answer)[0] > 0


def test_a_prediction_of_another_kind_is_refused(demo_server: Server) -> None:
    for wrong in ({"type": "tokens", "content": "a"}, {"type": "content", "content": [{"type": "image"}]}):  # fmt: skip
        response = httpx.post(
            f"{demo_server.url}/v1/chat/completions", json={**ASK, "prediction": wrong}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prediction"
