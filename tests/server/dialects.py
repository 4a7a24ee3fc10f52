"""One request in each API, and the text of its answer as a client puts it together."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.servers import Server

LENGTH = 160
_PROMPT = "The cat sat on the mat and"
_CHAT = [{"role": "user", "content": _PROMPT}]
_SAMPLED = {"temperature": 1.0, "seed": 11, "ignore_eos": True}

Json = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """An API."""

    name: str
    path: str
    body: Json
    """Without ``stream``."""
    piece: Callable[[Json], str]
    """The text that an event adds."""
    whole: Callable[[Json], str]
    """The text of an answer that is not streamed."""
    error: Callable[[Json], str] = lambda told: told["error"]["message"]
    repeats: bool = False
    """Each event has the whole text so far."""


def _text(told: Json, *names: str) -> str:
    """Reasoning and text are one."""
    return "".join(told.get(name) or "" for name in names)


def _messages_piece(told: Json) -> str:
    return _text(told.get("delta", {}), "thinking", "text")


def _responses_piece(told: Json) -> str:
    kinds = ("response.reasoning_text.delta", "response.output_text.delta")
    return told["delta"] if told["type"] in kinds else ""


def _responses_text(told: Json) -> str:
    return "".join(part["text"] for item in told["output"] for part in item["content"])


def _messages_error(told: Json) -> str:
    assert told["type"] == "error"
    return told["error"]["message"]


DIALECTS = [
    Dialect(
        "chat",
        "/v1/chat/completions",
        {"messages": _CHAT, "max_tokens": LENGTH, **_SAMPLED},
        lambda told: "".join(
            _text(c["delta"], "reasoning_content", "content") for c in told["choices"]
        ),
        lambda told: _text(told["choices"][0]["message"], "reasoning_content", "content"),
    ),
    Dialect(
        "completions",
        "/v1/completions",
        {"prompt": _PROMPT, "max_tokens": LENGTH, **_SAMPLED},
        lambda told: "".join(choice["text"] for choice in told["choices"]),
        lambda told: told["choices"][0]["text"],
    ),
    Dialect(
        "responses",
        "/v1/responses",
        {"input": _PROMPT, "max_output_tokens": LENGTH, **_SAMPLED},
        _responses_piece,
        _responses_text,
    ),
    Dialect(
        "messages",
        "/v1/messages",
        {"model": "tiny", "messages": _CHAT, "max_tokens": LENGTH, **_SAMPLED},
        _messages_piece,
        lambda told: "".join(_text(block, "thinking", "text") for block in told["content"]),
        _messages_error,
    ),
    Dialect(
        "ollama",
        "/api/chat",
        {
            "model": "tiny",
            "messages": _CHAT,
            "ignore_eos": True,
            "options": {"num_predict": LENGTH, "temperature": 1.0, "seed": 11},
        },
        lambda told: _text(told["message"], "thinking", "content"),
        lambda told: _text(told["message"], "thinking", "content"),
        lambda told: told["error"],
    ),
    Dialect(
        "native",
        "/generate",
        {
            "text": _PROMPT,
            "sampling_params": {
                "max_new_tokens": LENGTH,
                "temperature": 1.0,
                "sampling_seed": 11,
                "ignore_eos": True,
            },
        },
        lambda told: told["text"],
        lambda told: told["text"],
        repeats=True,
    ),
]


class DialectStream:
    """A streamed answer, read in a thread."""

    def __init__(self, server: Server, dialect: Dialect) -> None:
        self.text = ""
        self._url = f"{server.url}{dialect.path}"
        self._dialect = dialect

    def run(self) -> str:
        """The text; the stream must not be cut, and must not have an error in it."""
        body = {**self._dialect.body, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if (data := line.removeprefix("data: ")).startswith("{"):
                    self._read(json.loads(data))
        return self.text

    def _read(self, told: Json) -> None:
        assert "error" not in told or told["error"] is None, told
        piece = self._dialect.piece(told)
        self.text = piece if self._dialect.repeats else self.text + piece


def whole_answer(server: Server, dialect: Dialect) -> str:
    """The text of an answer that is not streamed."""
    body = {**dialect.body, "stream": False}
    response = httpx.post(f"{server.url}{dialect.path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return dialect.whole(response.json())


def assert_refused(server: Server, dialect: Dialect, reason: str) -> None:
    """A new request gets 503 with ``Retry-After``, in the form of its API."""
    for stream in (False, True):
        body = {**dialect.body, "stream": stream}
        response = httpx.post(f"{server.url}{dialect.path}", json=body, timeout=20)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert reason in dialect.error(response.json()), dialect.name
