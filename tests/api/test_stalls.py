"""No request holds an event loop for long: neither that of the api, nor that of the tokenizer
process."""

import asyncio
import gc
import time
from typing import Any

import pytest

from tests.api.conftest import RunningServer, StartServer
from tests.api.hostile_bodies import ATTACKS
from tests.servers.fake_scheduler import engine_info

LONGEST_MS = 250.0
"""CPU time of a callback of an event loop, where :func:`known_work_ms` is 6. The longest take 60
ms; before the limits some took 30 s."""


def known_work_ms() -> float:
    """CPU time of some work in Python, the best of three."""
    times = []
    for _ in range(3):
        begin = time.thread_time()
        sum(number * number for number in range(200_000))
        times.append(1000 * (time.thread_time() - begin))
    return min(times)


class Callbacks:
    """The CPU time of the callbacks of all event loops of this process."""

    def __init__(self) -> None:
        self.longest_ms = 0.0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            begin = time.thread_time()
            run(handle)
            self.longest_ms = max(self.longest_ms, 1000 * (time.thread_time() - begin))

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Callbacks:
    """Objects of the tests are no garbage, and the processes of a server have none of them: the
    collector does not visit them again, neither in later tests."""
    gc.collect()
    gc.freeze()
    callbacks = Callbacks()
    callbacks.watch(monkeypatch)
    return callbacks


@pytest.fixture(scope="module")
def long_context(start_server: StartServer) -> RunningServer:
    return start_server(engine_info(context_length=8192, kv_pool_tokens=8192))


@pytest.mark.parametrize(
    ("name", "status"),
    {
        "32 MB of []": 413,
        "1,000,000 empty strings": 400,
        "999,000 19-digit integers": 400,
        "90,000 unknown keys": 200,
        "logit_bias of 1,000,000": 413,
        "logit_bias of 90,000": 400,
        "stop_token_ids of 900,000": 413,
        "16,000 messages": 400,
        "49,000 messages": 413,
        "10,000 tools": 413,
        "/detokenize, 1,000,000 ids": 413,
        "schema as a text of 16 MB of []": 400,
        "grammar of 20,000 empty lines": 400,
        "grammar of 50,000 rules": 400,
        "/v1/cache/release, 90,000 sessions": 400,
        "chat_template_kwargs of 90,000": 400,
        "/generate, input logprobs": 200,
        "prompt_logprobs 20, long prompt": 200,
    }.items(),
)
def test_a_hostile_request_holds_no_event_loop(
    long_context: RunningServer, callbacks: Callbacks, name: str, status: int
) -> None:
    attack = ATTACKS[name]
    long_context.answer_with("Hello world")
    with long_context.http as client:
        response = client.post(attack.path, content=attack.body())
    assert response.status_code == status, response.text[:200]
    assert callbacks.longest_ms < LONGEST_MS * max(1.0, known_work_ms() / 6)
