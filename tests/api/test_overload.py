"""More requests than the server takes, and clients that do not read."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from radixrt.api.http import connection
from radixrt.api.http.gate import Pace
from radixrt.client.open_requests import Mailbox
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.logprobs import TokenLogprob
from radixrt.messages.sequences import SequenceRefused
from tests.api.conftest import RunningServer, StartServer, wait_until
from tests.servers import samples

PATH = "/v1/completions"


def metric(server: RunningServer, name: str) -> float:
    return samples(server.http.get("/metrics").text)[f"radixrt_{name}", ()]


def send(server: RunningServer, body: dict, receive_buffer: int | None = None) -> socket.socket:
    """Send a request, and leave its answer unread."""
    address = urlsplit(server.url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    client.sendall(head.encode() + b"Connection: close\r\n\r\n" + content)
    return client


# ------------------------------------------------------------ too many requests


@pytest.fixture(scope="module")
def small_server(start_server: StartServer) -> RunningServer:
    """It takes three requests at a time."""
    return start_server(max_running_requests=1, max_queued_requests=2)


@pytest.fixture
def full_server(small_server: RunningServer) -> Iterator[RunningServer]:
    scheduler = small_server.scheduler
    scheduler.requests.clear()
    scheduler.paused.set()
    with ExitStack() as stack:
        for number in range(3):
            body = {"prompt": "hi", "max_tokens": 2, "rid": f"full{number}"}
            stack.enter_context(send(small_server, body))
        wait_until(lambda: len(scheduler.requests) == 3)
        yield small_server
    scheduler.paused.clear()
    wait_until(lambda: is_served(small_server))


def is_served(server: RunningServer) -> bool:
    return server.http.post(PATH, json={"prompt": "hi", "max_tokens": 2}).is_success


def test_what_is_too_much_is_refused_before_any_work(full_server: RunningServer) -> None:
    refused = metric(full_server, "refused_requests_total")
    response = httpx.post(f"{full_server.url}{PATH}", content=b"not even JSON", timeout=20)
    assert response.status_code == 503 and response.headers["retry-after"] == "2"
    assert "3 open requests" in response.json()["error"]["message"]
    assert metric(full_server, "refused_requests_total") == refused + 1
    message = httpx.post(f"{full_server.url}/v1/messages", content=b"", timeout=20).json()
    assert (message["type"], message["error"]["type"]) == ("error", "overloaded_error")
    assert isinstance(httpx.post(f"{full_server.url}/api/chat", timeout=20).json()["error"], str)


def test_a_full_server_tells_its_state_and_lets_work_be_ended(full_server: RunningServer) -> None:
    with full_server.http as http:
        for path in ("/health", "/ready", "/metrics", "/ping", "/v1/models"):
            assert http.get(path).status_code == 200
        assert http.post("/abort_request", json={"rid": "full0"}).status_code == 200
        full_server.scheduler.paused.clear()
        wait_until(lambda: is_served(full_server))


def test_work_is_spread_over_turns_of_the_event_loop() -> None:
    async def scene() -> None:
        pace, begun = Pace(per_turn=3), []
        ran_now = [pace.run(lambda number=number: begun.append(number)) for number in range(8)]
        assert ran_now == [True] * 3 + [False] * 5
        seen = []
        while not seen or seen[-1] < 8:
            seen.append(len(begun))
            await asyncio.sleep(0)
        assert begun == [*range(8)] and {3, 6, 8} == {*seen}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pace.run(lambda: begun.append(8)) and begun[-1] == 8

    asyncio.run(scene())


def test_a_batch_is_one_group_for_the_scheduler(server: RunningServer) -> None:
    """Whatever id the client gives, also one that it has used before."""
    server.answer_with("a")
    batches = [{"prompt": ["a", "b", "c"]}, {"prompt": "a", "n": 3}]
    for body in batches * 2:
        assert server.http.post(PATH, json=body | {"rid": "mine"}).is_success
    requests = server.scheduler.requests[-12:]
    groups = [{request.group for request in requests[start : start + 3]} for start in (0, 3, 6, 9)]
    assert [len(group) for group in groups] == [1, 1, 1, 1] and len(set.union(*groups)) == 4
    assert all(request.group_size == 3 for request in requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_that_would_wait_too_long_gets_503_as_a_whole(
    server: RunningServer, stream: bool
) -> None:
    server.answer_endlessly()
    server.scheduler.refuse = lambda request: SequenceRefused(request.seq_id, "It waits.", 503, 7)
    body = {"prompt": ["a", "b", "c"], "n": 2, "stream": stream}
    response = server.http.post(PATH, json=body)
    assert response.status_code == 503 and response.headers["retry-after"] == "7"
    assert response.json()["error"]["message"] == "It waits."
    wait_until(lambda: server.scheduler.num_running == 0)


# ------------------------------------------------------------ slow readers

LONG = {"prompt": "hi", "n": 16, "max_tokens": 500, "ignore_eos": True, "stream": True}
"""Its answer is some 2 MB long, which no buffer takes."""


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.4)


@pytest.mark.usefixtures("short_limit")
def test_a_client_that_does_not_read_is_cut_off_and_its_work_ends(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.002
    cut = metric(server, "slow_readers_total")
    with send(server, LONG, receive_buffer=4096), server.http as http:
        wait_until(lambda: metric(server, "slow_readers_total") == cut + 1, timeout_s=20)
        wait_until(lambda: server.scheduler.num_running == 0)
        answer = http.post(PATH, json={"prompt": "hi", "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.usefixtures("short_limit")
def test_a_client_that_reads_steadily_gets_everything(server: RunningServer) -> None:
    server.answer_endlessly()
    cut = metric(server, "slow_readers_total")
    received = []
    with send(server, {**LONG, "max_tokens": 200}, receive_buffer=65536) as client:
        while piece := client.recv(65536):
            received.append(piece)
            time.sleep(0.02)
    assert b"".join(received).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert metric(server, "slow_readers_total") == cut


def test_readers_that_stop_cost_other_streams_nothing(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.002
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(send(server, LONG, receive_buffer=4096))
        wait_until(lambda: len(server.scheduler.requests) == 8 * LONG["n"], timeout_s=20)
        body = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with server.http as http, http.stream("POST", PATH, json=body) as response:
            events = [line for line in response.iter_lines() if line.startswith("data")]
        assert len(events) >= 50 and events[-1] == "data: [DONE]"
    wait_until(lambda: server.scheduler.num_running == 0, timeout_s=20)


def test_log_probabilities_count_towards_the_unread() -> None:
    async def scene() -> None:
        token = TokenLogprob(1, "a", b"a", -1.0, [TokenLogprob(2, "b", b"b", -2.0)] * 19)
        chunk = AnswerChunk(request_id="", index=0, text="a", token_ids=b"", logprobs=[token])
        mailbox = Mailbox(100)
        taken = 0
        while mailbox.put(chunk):
            taken += 1
        assert taken == 10  # 11 each
        for _ in range(taken):
            assert await mailbox.get() is chunk

    asyncio.run(scene())
