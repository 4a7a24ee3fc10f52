"""The server hears of pauses before they come."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import radixrt.lang as rl

ANSWER = b'{"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}'


class Recorder(ThreadingHTTPServer):
    """Answers "b" to everything, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for one, body in self.requests if one == path]


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, body))
        self._answer(ANSWER)

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@rl.function
def program(s: rl.State, word: str = "a") -> None:
    s += word + rl.gen("x")
    with s.waiting(30):
        s += rl.gen("y")
    with s.fork(2) as forks:
        for number, fork in enumerate(forks):
            fork += str(number) + rl.gen("z")


def test_a_call_before_a_pause_tells_its_length(recorder: Recorder) -> None:
    state = program.run(backend=recorder.url)
    assert state.text() == "abb" and state["z"] == ["b", "b"]
    sent = {body["prompt"]: body.get("cache") for body in recorder.bodies("/v1/completions")}
    assert sent == {"a": None, "ab": {"next_use_s": 30}, "abb0": None, "abb1": None}
