"""The probability that a constraint left: in chats, completions and /generate, whole and
streamed."""

import json
import math
from typing import Any

import pytest

from tests.api.conftest import RunningServer
from tests.servers.fake_scheduler import KEPT_MASS

HELLO = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "the fox"},
}


def choices(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """The first choice of the answer, or of each event."""
    with server.http as http:
        response = http.post(path, json=ENDPOINTS[path] | body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [response.json()["choices"][0]]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_its_mass_and_the_last_event_the_total(
    server: RunningServer, path: str, stream: bool
) -> None:
    found = choices(server, path, kept_mass=True, return_token_ids=True, stream=stream)
    masses: list[float] = []
    for choice in found:
        new = choice.get("constraint", {"kept_mass": []})
        assert len(new["kept_mass"]) == len(choice.get("token_ids", ()))
        masses += new["kept_mass"]
        if new["kept_mass"]:
            assert new["log_kept_mass"] == pytest.approx(len(masses) * math.log(KEPT_MASS))
        assert choice.get("logprobs") is None
    assert masses == pytest.approx([KEPT_MASS] * len(masses)) and len(masses) > 2
    assert stream == (len(found) > 2)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_nobody_gets_it_who_does_not_ask(server: RunningServer, path: str) -> None:
    (choice,) = choices(server, path)
    assert "constraint" not in choice
    with_logprobs = {"logprobs": True if "chat" in path else 1, "kept_mass": True}
    (choice,) = choices(server, path, **with_logprobs)
    logprobs = choice["logprobs"]
    assert len(logprobs.get("content") or logprobs["tokens"]) == len(
        choice["constraint"]["kept_mass"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_generate_has_it_in_the_meta_info(server: RunningServer, stream: bool) -> None:
    body = {"text": "hi", "sampling_params": {"kept_mass": True}, "stream": stream}
    with server.http as http:
        text = http.post("/generate", json=body).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    last = json.loads(events[-2] if stream else text)
    found = last["meta_info"]["constraint"]
    assert found["kept_mass"] == pytest.approx([KEPT_MASS] * len(last["output_ids"]))
    assert found["log_kept_mass"] == pytest.approx(sum(map(math.log, found["kept_mass"])))


def test_it_is_true_or_false(server: RunningServer) -> None:
    with server.http as http:
        response = http.post("/v1/completions", json={"prompt": "hi", "kept_mass": 3})
    assert response.status_code == 400 and "kept_mass" in response.text


DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 8}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 8}},
}


@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_has_it_at_the_end(server: RunningServer, path: str) -> None:
    body = {"model": server.model_name} if hasattr(server, "model_name") else {}
    with server.http as http:
        answer = http.post(path, json=DIALECTS[path] | body | {"kept_mass": True})
        without = http.post(path, json=DIALECTS[path] | body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["constraint"]
    assert len(found["kept_mass"]) > 2
    assert found["kept_mass"] == pytest.approx([KEPT_MASS] * len(found["kept_mass"]))
    assert found["log_kept_mass"] == pytest.approx(sum(map(math.log, found["kept_mass"])))
    assert "constraint" not in without.json()
