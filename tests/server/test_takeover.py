"""The death of an engine's process loses no answer: the next engine goes on with the same tokens."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import Server
from tests.server.test_life import assert_all_gone

PROMPT = "The cat sat on the mat and"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 60}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CHECKED = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 12}


def request(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 440, "ignore_eos": True, "stream": True, **fields}


REQUESTS = [
    request(temperature=0),
    request(temperature=1.0, seed=1),
    request(temperature=1.5, seed=2, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3),
    request(temperature=1.0, seed=3, n=2),
    request(temperature=0.8, seed=4, logprobs=2),
    request(temperature=1.0, seed=5, guided_json=SCHEMA, ignore_eos=False),
    request(temperature=1.0, seed=6, guided_json=CHECKED, ignore_eos=False),
    request(temperature=1.0, seed=7, guided_regex="([a-z]{1,6} ){30}", ignore_eos=False),
]


class Stream:
    """One streamed answer, read in a thread."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.texts: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self.num_events = 0
        self.error = ""
        self._body = {**body, "stream_options": {"include_usage": True}}
        self._server = server

    def run(self) -> "Stream":
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._read(json.loads(line.removeprefix("data: ")))
        return self

    def _read(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]


def process_of(server: Server, name: str) -> psutil.Process:
    """The process of the engine that runs; a dead one may not be gone yet."""
    alive = [p for p in server.family() if p.status() != psutil.STATUS_ZOMBIE]
    (process,) = [p for p in alive if f"radixrt.{name}" in p.cmdline()]
    return process


def wait_until_ready(server: Server, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while httpx.get(f"{server.url}/ready").status_code != 200:
        assert time.monotonic() < deadline, "".join(server.log[-30:])
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--step-timeout", "4", "--shutdown-grace", "20")


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[dict[int, str]]:
    return [Stream(server, body).run().texts for body in REQUESTS]


EVERY_DEATH = [
    (victim, how)
    for victim in ("worker", "scheduler", "tokenizer")
    for how in (signal.SIGKILL, signal.SIGSTOP)
]
DEATHS = EVERY_DEATH if "RADIXRT_TORTURE" in os.environ else [EVERY_DEATH[0], EVERY_DEATH[3]]
"""The death of any process ends its engine; `make torture` tries each process and both ways."""


@pytest.mark.parametrize(("victim", "how"), DEATHS)
def test_answers_go_on_as_if_nothing_had_happened(
    server: Server, undisturbed: list[dict[int, str]], victim: str, how: int
) -> None:
    """A process that stops (SIGSTOP) is found by its heartbeat."""
    wait_until_ready(server)
    process, lines_before = process_of(server, victim), len(server.log)
    streams = [Stream(server, body) for body in REQUESTS]
    with ThreadPoolExecutor(len(streams)) as threads:
        running = [threads.submit(stream.run) for stream in streams]
        while min(stream.num_events for stream in streams[:5]) < 3:
            time.sleep(0.002)
        process.send_signal(how)
        done = [future.result() for future in running]
    assert [stream.texts for stream in done] == undisturbed
    assert all(stream.finish and not stream.error for stream in done)
    assert done[0].usage["completion_tokens"] == 440
    took_over = re.search(r"goes on with (\d+) requests", "".join(server.log[lines_before:]))
    assert took_over is not None and int(took_over[1]) > 0
    wait_until_ready(server)
    assert server.info(check_invariants=True)["invariants"] == "ok"


def test_an_answer_that_does_not_stream_is_not_lost_either(
    server: Server, undisturbed: list[dict[int, str]]
) -> None:
    wait_until_ready(server)
    body = {**REQUESTS[1], "stream": False}
    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(
            httpx.post, f"{server.url}/v1/completions", json=body, timeout=120
        )
        time.sleep(0.05)
        process_of(server, "worker").kill()
        assert answering.result().json()["choices"][0]["text"] == undisturbed[1][0]


def test_a_server_that_is_restarting_is_alive_and_not_ready(server: Server) -> None:
    wait_until_ready(server)
    process_of(server, "scheduler").kill()
    deadline = time.monotonic() + 10
    while (ready := httpx.get(f"{server.url}/ready")).status_code == 200:
        assert time.monotonic() < deadline
    assert ready.status_code == 503 and "restarted" in ready.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    wait_until_ready(server)


def test_a_request_keeps_its_deadline_though_a_process_hangs(server: Server) -> None:
    wait_until_ready(server)
    scheduler = process_of(server, "scheduler")
    scheduler.suspend()
    begin = time.monotonic()
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": PROMPT, "timeout": 1.0}, timeout=60
    )
    assert time.monotonic() - begin < 3
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    wait_until_ready(server)


def test_three_deaths_without_a_token_end_the_server_with_the_reason(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    family = server.family()
    for deaths in range(1, 4):
        wait_until_ready(server)
        process_of(server, "worker").kill()
        while "".join(server.log).count("was killed by SIGKILL") < deaths:
            time.sleep(0.02)
    assert server.process.wait(30) == 1
    assert "The worker process was killed by SIGKILL" in "".join(server.log)
    assert_all_gone(family)


def test_sigterm_lets_running_answers_end_and_refuses_new_ones(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    stream = Stream(server, request(temperature=0, max_tokens=400))
    reading = threading.Thread(target=stream.run)
    reading.start()
    while stream.num_events < 3:
        time.sleep(0.005)
    server.process.terminate()
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT})
    assert refused.status_code == 503 and "shutting down" in refused.text
    assert int(refused.headers["retry-after"]) > 0
    assert httpx.get(f"{server.url}/ready").status_code == 503
    reading.join(60)
    assert stream.finish == {0: "length"} and stream.usage["completion_tokens"] == 400
    assert server.process.wait(20) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_with_an_error_event(
    start_server: Callable[..., Server], second: int
) -> None:
    server = start_server()
    stream = Stream(server, request(temperature=0, max_tokens=480))
    reading = threading.Thread(target=stream.run)
    reading.start()
    while stream.num_events < 3:
        time.sleep(0.005)
    server.process.terminate()
    time.sleep(0.2)
    server.process.send_signal(second)
    assert server.process.wait(10) == 0
    reading.join(10)
    assert "stopped" in stream.error
