"""The death of an engine's process loses no answer: the next engine goes on with the same tokens.

The tests of one server run in order, on engine after engine, and the last one ends it. `make
torture` has many more deaths.
"""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import Server
from tests.server.dialects import DIALECTS, LENGTH, DialectStream, whole_answer
from tests.server.test_kv_events import EXAMPLE
from tests.torture.leaks import processes_of

PROMPT = "The cat sat on the mat and"
TO_PIN = "A prompt that is pinned, of more than one page. " * 4
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 60}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CHECKED = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 12}
BUDGET = 80
"""Tokens of the reasoning of the chat."""


def request(**fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": True}
    return {**body, "speculation": False, **fields}


REQUESTS = [
    request(temperature=0),
    request(temperature=1.0, seed=1),
    request(temperature=1.5, seed=2, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3),
    request(temperature=1.0, seed=3, n=2),
    request(temperature=0.8, seed=4, logprobs=2),
    request(temperature=1.0, seed=5, guided_json=SCHEMA, ignore_eos=False),
    request(temperature=1.0, seed=6, guided_json=CHECKED, ignore_eos=False),
    request(temperature=1.0, seed=7, guided_regex="([a-z]{1,6} ){30}", ignore_eos=False),
    request(
        temperature=1.0,
        seed=8,
        messages=[{"role": "user", "content": PROMPT}],
        max_reasoning_tokens=BUDGET,
    ),
]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
UNSENDABLE: list[dict[str, Any]] = [
    {**CHAT, "chat_template_kwargs": {"x": 10**30}},
    {**CHAT, "chat_template_kwargs": {"x": "a\ud800b"}},
    {"prompt": "a\ud800b"},
]
"""Calls that no process can hand to another."""


class Stream:
    """One streamed answer, read in a thread."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.texts: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self.receipts: list[dict[str, Any]] = []
        self.num_events = 0
        self.error = ""
        self._body = {**body, "stream_options": {"include_usage": True}}
        self._server = server

    def run(self) -> "Stream":
        try:
            self._run()
        except httpx.HTTPError as error:
            self.error = repr(error)
        return self

    def _run(self) -> None:
        url = f"{self._server.url}/v1/{'chat/' if 'messages' in self._body else ''}completions"
        with httpx.stream("POST", url, json=self._body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._read(json.loads(line.removeprefix("data: ")))

    def _read(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.usage = event.get("usage") or self.usage
        assert "replayed_tokens" not in self.usage, "the answers that are compared are computed"
        for choice in event["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {})
            piece = delta.get("reasoning", "") + delta["content"] if delta else choice["text"]
            self.texts[index] = self.texts.get(index, "") + piece
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]
                self.receipts += [choice["receipt"]] if "receipt" in choice else []

    def wait_for_events(self) -> None:
        deadline = time.monotonic() + 60
        while self.num_events < 3:
            assert time.monotonic() < deadline, self.error
            time.sleep(0.002)


def process_of(server: Server, name: str) -> psutil.Process:
    """The process of the engine that runs; a dead one may not be gone yet."""
    deadline = time.monotonic() + 30
    while True:
        found = commands_of(server, name)
        if len(found) == 1:
            return next(iter(found))
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def commands_of(server: Server, name: str) -> dict[psutil.Process, list[str]]:
    """The processes of this name that live, and their command lines."""
    commands = {}
    for process in server.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, or is a zombie
            commands[process] = process.cmdline()
    return {process: line for process, line in commands.items() if f"radixrt.{name}" in line}


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_ready(server: Server, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while httpx.get(f"{server.url}/ready").status_code != 200:
        assert time.monotonic() < deadline, "".join(server.log[-30:])
        time.sleep(0.1)


def wait_until_unready(server: Server, reason: str = "restarted") -> None:
    """It says so, and is alive."""
    deadline = time.monotonic() + 30
    while (ready := httpx.get(f"{server.url}/ready")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ready.status_code == 503 and reason in ready.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=json.dumps(body), headers=headers, timeout=120)


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rx"))  # pytest's own paths are too long for sockets
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], sockets: Path) -> Server:
    events = ("--kv-events", f"ipc://{sockets}/events", "--kv-events-replay", f"ipc://{sockets}/replays")  # fmt: skip
    return start_server("--reasoning-parser", "deepseek-r1", *events)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[dict[int, str]]:
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(lambda body: Stream(server, body).run().texts, REQUESTS))


@pytest.fixture(scope="module")
def undisturbed_dialects(server: Server) -> list[str]:
    """The text of each API's answer, which is the same whether it streams or not."""
    texts = [DialectStream(server, dialect).run() for dialect in DIALECTS]
    assert texts == [whole_answer(server, dialect) for dialect in DIALECTS]
    assert all(len(text) > LENGTH / 4 for text in texts)
    return texts


@dataclass
class Kept:
    """A lease and a subscriber that are there before any death."""

    lease: dict[str, Any]
    mirror: Any
    stream: Any
    """That the subscriber follows then."""


@pytest.fixture(scope="module")
def kept(server: Server, sockets: Path) -> Kept:
    wait_until_ready(server)
    mirror = runpy.run_path(str(EXAMPLE))["subscribe"](
        f"ipc://{sockets}/events", f"ipc://{sockets}/replays"
    )
    lease = post(server, "/v1/cache/pin", {"prompt": TO_PIN, "ttl_s": 600}).json()
    follow(mirror, lambda: mirror.hashes)
    return Kept(lease, mirror, mirror.stream)


def follow(mirror: Any, condition: Callable[[], Any]) -> None:
    """Take batches of events until the condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        mirror.update(100)


EVERY_DEATH = [
    (victim, how)
    for victim in ("worker", "scheduler", "tokenizer")
    for how in (signal.SIGKILL, signal.SIGSTOP)
]
DEATHS = EVERY_DEATH if "RADIXRT_TORTURE" in os.environ else [EVERY_DEATH[0], EVERY_DEATH[3]]
"""The death of any process but the tokenizer process ends its engine; `make torture` tries each
process and both ways."""


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("victim", "how"), DEATHS)
def test_answers_go_on_as_if_nothing_had_happened(
    server: Server,
    undisturbed: list[dict[int, str]],
    undisturbed_dialects: list[str],
    victim: str,
    how: int,
) -> None:
    """A process that stops (SIGSTOP) is found by its heartbeat, and does not keep the deadline of a
    request."""
    wait_until_ready(server)
    process, lines_before = process_of(server, victim), len(server.log)
    scheduler = process_of(server, "scheduler")
    streams = [Stream(server, body) for body in REQUESTS]
    dialects = [DialectStream(server, dialect) for dialect in DIALECTS]
    with ThreadPoolExecutor(len(streams) + 2 * len(dialects) + 2 + len(UNSENDABLE)) as threads:
        running = [threads.submit(stream.run) for stream in streams]
        texts = [threads.submit(dialect.run) for dialect in dialects]
        texts += [threads.submit(whole_answer, server, dialect) for dialect in DIALECTS]
        whole = threads.submit(post, server, "/v1/completions", {**REQUESTS[1], "stream": False})
        for stream in streams[:5]:
            stream.wait_for_events()
        until(lambda: all(dialect.text for dialect in dialects))
        process.send_signal(how)
        wait_until_unready(server)
        assert how == signal.SIGKILL or is_alive(process), "heartbeats are missed before that"
        if how == signal.SIGSTOP:
            expect_deadline_to_be_kept(server)
        until(lambda: not is_alive(process))  # sooner than by the limit of a step
        tokenizing = threads.submit(post, server, "/tokenize", {"prompt": PROMPT})
        hopeless = [threads.submit(post, server, "/tokenize", body) for body in UNSENDABLE]
        done = [future.result() for future in running]
    assert [stream.texts for stream in done] == undisturbed
    assert [text.result() for text in texts] == undisturbed_dialects * 2
    assert whole.result().json()["choices"][0]["text"] == undisturbed[1][0]
    assert tokenizing.result().json()["count"] > 3
    assert {future.result().status_code for future in hopeless} == {400}
    assert all(stream.finish and not stream.error for stream in done)
    assert done[0].usage["completion_tokens"] == 240
    assert done[-1].usage["completion_tokens_details"]["reasoning_tokens"] == BUDGET
    took_over = re.search(r"goes on with (\d+) requests", "".join(server.log[lines_before:]))
    assert took_over is not None and int(took_over[1]) > 0
    wait_until_ready(server)
    assert server.info(check_invariants=True)["invariants"] == "ok"
    assert is_alive(scheduler) == (victim == "tokenizer")


def expect_deadline_to_be_kept(server: Server) -> None:
    begin = time.monotonic()
    answer = post(server, "/v1/completions", {"prompt": PROMPT, "timeout": 0.1})
    assert time.monotonic() - begin < 3, "before it is known that the process hangs"
    assert answer.json()["choices"][0]["finish_reason"] == "abort"


def test_leases_and_subscribers_survive_and_three_deaths_without_a_token_are_the_end(
    server: Server, kept: Kept
) -> None:
    wait_until_ready(server)
    mirror = kept.mirror
    until(lambda: server.info()["stats"]["leases"] == 1)
    pages = server.info(check_invariants=True)["stats"]["pages_cached"]
    follow(mirror, lambda: mirror.stream != kept.stream and len(mirror.hashes) == pages)
    released = post(server, "/v1/cache/release", {"lease": kept.lease["lease"]})
    assert released.json() == {"released_tokens": kept.lease["pinned_tokens"]}
    for socket in (mirror.events, mirror.replays):
        socket.close(linger=0)

    for _ in range(3):  # the last two before the new engine is ready
        worker = process_of(server, "worker")
        worker.kill()
        worker.wait(20)
    assert server.process.wait(30) == 1
    until(lambda: "The worker process was killed by SIGKILL" in "".join(server.log))
    until(lambda: not processes_of(server))


def until(condition: Callable[[], Any], timeout_s: float = 20, pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause_s)
