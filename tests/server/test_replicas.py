"""``--dp 2``: the death of one replica loses no answer, and the replica comes back."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.server.conftest import Server
from tests.server.test_takeover import REQUESTS, Stream, is_alive, until
from tests.servers import samples

FLAGS = ("--dp", "2", "--dtype", "float32", "--page-size", "4", "--reasoning-parser", "deepseek-r1")
ROUNDS = 20 if "RADIXRT_TORTURE" in os.environ else 1
LONGEST_PAUSE_S = 20.0
"""Of the slowest test machine. The promise of docs/routing.md is measured by hand."""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server(*FLAGS)


def workers(server: Server) -> dict[str, psutil.Process]:
    """By the number of their replica."""
    found = [p for p in server.family() if is_alive(p) and "radixrt.worker" in p.cmdline()]
    return {p.cmdline()[p.cmdline().index("--replica") + 1]: p for p in found}


def of_replica(server: Server, name: str) -> dict[str, float]:
    """A metric by replica."""
    metrics = samples(httpx.get(f"{server.url}/metrics", timeout=30).text)
    return {dict(labels)["replica"]: v for (n, labels), v in metrics.items() if n == name}


def test_answers_of_a_killed_replica_go_on_with_the_same_tokens(server: Server) -> None:
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        undisturbed = list(threads.map(lambda body: Stream(server, body).run().texts, REQUESTS))
        for number in range(ROUNDS):
            until(
                lambda: (
                    len(workers(server)) == 2
                    and len(of_replica(server, "radixrt_steps_total")) == 2
                )
            )
            streams = [Stream(server, body) for body in REQUESTS]
            running = [threads.submit(stream.run) for stream in streams]
            for stream in streams[:5]:
                stream.wait_for_events()
            busy = of_replica(server, "radixrt_running_requests")
            assert min(busy.values()) > 0, "both work"
            victim = workers(server)[str(number % 2)]
            victim.kill()
            done = [future.result(LONGEST_PAUSE_S) for future in running]
            assert [stream.texts for stream in done] == undisturbed
            assert all(stream.finish and not stream.error for stream in done)
            assert httpx.get(f"{server.url}/ready").status_code == 200, "the other replica serves"
    until(lambda: len(of_replica(server, "radixrt_steps_total")) == 2)
    assert server.info(check_invariants=True)["invariants"] == "ok"
    names = sorted(p.cmdline()[4] for p in server.family() if is_alive(p) and "-m" in p.cmdline())
    engine = [
        name
        for name in names
        if name in ("radixrt.worker", "radixrt.scheduler", "radixrt.tokenizer")
    ]
    assert engine == [*["radixrt.scheduler"] * 2, "radixrt.tokenizer", *["radixrt.worker"] * 2]


def test_requests_of_one_prefix_share_a_replica(server: Server) -> None:
    prefix = "A long document that is asked about again and again. " * 12
    before = server.info()["stats"]["cached_tokens"]
    for question in range(4):
        body = {"prompt": f"{prefix} Question {question}?", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        time.sleep(0.05)  # the replica's report
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * answer["usage"]["prompt_tokens"]
    assert server.info()["stats"]["cached_tokens"] >= before + 3 * cached * 0.9
