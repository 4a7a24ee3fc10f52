"""What a server hears of a program's future, if it wants to, and that it changes nothing where it does not."""

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

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoints = endpoints
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for one, body in self.requests if one == path]


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._answer(json.dumps({"endpoints": self.server.endpoints}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, body))
        if self.path == "/v1/cache/release":
            self.server.released.set()
            self._answer(b"{}")
        else:
            self._answer(ANSWER)

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(params=[["/v1/completions", "/v1/cache/release"], ["/v1/completions"]])
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    with Recorder(request.param) as server:
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


def test_each_call_says_what_the_program_will_do_next(recorder: Recorder) -> None:
    state = program.run(backend=recorder.url)
    assert state.text() == "abb" and state["z"] == ["b", "b"]
    sent = {body["prompt"]: body.get("cache") for body in recorder.bodies("/v1/completions")}
    assert sent.keys() == {"a", "ab", "abb0", "abb1"}
    if "/v1/cache/release" not in recorder.endpoints:
        assert set(sent.values()) == {None}
        return
    (session,) = {hints["session"] for hints in sent.values() if hints is not None}
    assert sent["a"] == {"session": session}
    assert sent["ab"] == {"session": session, "next_use_s": 30}
    assert sent["abb0"] == sent["abb1"] == {"session": session}


def test_runs_of_a_batch_are_released_when_others_have_gone_on(recorder: Recorder) -> None:
    inputs = [{"word": word} for word in "abc"]
    states = program.run_batch(inputs, backend=recorder.url, progress=False)
    assert [state.text() for state in states if isinstance(state, rl.State)] == [
        "abb",
        "bbb",
        "cbb",
    ]
    if "/v1/cache/release" in recorder.endpoints:
        assert recorder.released.wait(10)
        sessions = {body["cache"]["session"] for body in recorder.bodies("/v1/completions")}
        assert len(sessions) == 3
        released = [body["sessions"] for body in recorder.bodies("/v1/cache/release")]
        assert released and {session for some in released for session in some} < sessions
    else:
        assert recorder.bodies("/v1/cache/release") == []
