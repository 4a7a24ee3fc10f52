"""More requests than the server takes, and clients that do not read."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from radixrt.api import server as api_server
from radixrt.api.http import connection, events
from radixrt.api.http.gate import Throttle
from radixrt.client.open_requests import Mailbox
from radixrt.messages.answers import AnswerChunk, TokenLogprob
from radixrt.messages.sequences import SequenceRefused
from tests.api.conftest import RunningServer, StartServer, send, wait_until
from tests.servers import samples
from tests.servers.fake_scheduler import engine_info

PATH = "/v1/completions"


def metric(server: RunningServer, name: str) -> float:
    return samples(server.http.get("/metrics").text)[f"radixrt_{name}", ()]


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
        throttle, begun = Throttle(per_turn=3), []
        ran_now = [throttle.run(lambda number=number: begun.append(number)) for number in range(8)]
        assert ran_now == [True] * 3 + [False] * 5
        seen = []
        while not seen or seen[-1] < 8:
            seen.append(len(begun))
            await asyncio.sleep(0)
        assert begun == [*range(8)] and {3, 6, 8} == {*seen}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert throttle.run(lambda: begun.append(8)) and begun[-1] == 8

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


# ------------------------------------------------------------ pauses


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"])  # fmt: skip
def test_pauses_are_filled_with_comments(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Until the next token, as while a new engine starts."""
    monkeypatch.setattr(events, "COMMENT_EVERY_S", 0.05)
    server.answer_endlessly()
    server.scheduler.step_s = 0.2
    messages = [{"role": "user", "content": "hi"}]
    body = {"stream": True, "max_tokens": 30, "messages": messages}
    if path == "/v1/responses":
        body = {"stream": True, "max_output_tokens": 30, "input": "hi"}
    elif path in ("/v1/completions", "/generate"):
        body = {"stream": True, "max_tokens": 30, "prompt": "hi"}
    if path == "/generate":
        body = {"stream": True, "sampling_params": {"max_new_tokens": 30}, "text": "hi"}
    with server.http as http, http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        while "data" not in next(lines):
            pass
        server.scheduler.paused.set()
        seen = [next(line for line in lines if line.startswith(": ")) for _ in range(3)]
        server.scheduler.step_s = 0.0
        server.scheduler.paused.clear()
        assert seen == [": waiting"] * 3
        assert any("the" in line for line in lines)


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
        wait_until(lambda: metric(server, "slow_readers_total") == cut + 1)
        wait_until(lambda: server.scheduler.num_running == 0)
        answer = http.post(PATH, json={"prompt": "hi", "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.fixture(scope="module")
def small_buffers(start_server: StartServer) -> RunningServer:
    """A server that gives the system little to keep for a connection, so that one long answer fills
    all buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_server, "SEND_BUFFER_BYTES", 4096)
        info = engine_info(context_length=16384, kv_pool_tokens=32768)
        server = start_server(info=info, served_model_name="tiny")
        assert server.http.get("/health").is_success
    server.answer_endlessly()
    server.scheduler.step_s = 0.001
    return server


MESSAGES = [{"role": "user", "content": "hi"}]
UNREAD = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8000},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8000},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 8000},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 8000}},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 8000}},
}


@pytest.mark.parametrize("path", UNREAD)
def test_a_slow_reader_of_any_api_is_cut_off(
    small_buffers: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.1)  # it reads nothing at all
    server = small_buffers
    cut = metric(server, "slow_readers_total")
    with send(server, {**UNREAD[path], "stream": True}, receive_buffer=4096, path=path):
        wait_until(lambda: server.scheduler.num_running == 1)
        wait_until(lambda: metric(server, "slow_readers_total") == cut + 1)
        wait_until(lambda: server.scheduler.num_running == 0)


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
        wait_until(lambda: len(server.scheduler.requests) == 8 * LONG["n"])
        body = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with server.http as http, http.stream("POST", PATH, json=body) as response:
            events = [line for line in response.iter_lines() if line.startswith("data")]
        assert len(events) >= 50 and events[-1] == "data: [DONE]"
    wait_until(lambda: server.scheduler.num_running == 0)


def test_log_probabilities_count_towards_the_unread() -> None:
    async def scene() -> None:
        token = TokenLogprob(1, "a", b"a", -1.0, [TokenLogprob(2, "b", b"b", -2.0)] * 19)
        chunk = AnswerChunk(request_id="", index=0, text="a", token_ids=b"", logprobs=[token])
        mailbox = Mailbox(100)
        taken = 0
        while mailbox.put(taken, chunk):
            taken += 1
        assert taken == 10  # 11 each
        for number in range(taken):
            assert await mailbox.get() == (number, chunk)

    asyncio.run(scene())
