"""``--dp 2``: the death of one replica loses no answer, and the replica comes back."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.server.conftest import Server
from tests.server.test_takeover import REQUESTS, Stream, is_alive, until
from tests.servers import samples

FLAGS = ("--dp", "2", "--dtype", "float32", "--page-size", "4", "--reasoning-parser", "deepseek-r1")
DEATHS = 20 if "RADIXRT_TORTURE" in os.environ else 1
"""Of replicas with open requests."""
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
        taken_over = 0
        while taken_over < DEATHS:
            until(lambda: sorted(of_replica(server, "radixrt_steps_total")) == ["0", "1"])
            streams, lines_before = [Stream(server, body) for body in REQUESTS], len(server.log)
            running = [threads.submit(stream.run) for stream in streams]
            for stream in streams[:5]:
                stream.wait_for_events()
            busy = of_replica(server, "radixrt_running_requests")
            workers(server)[max(busy, key=busy.__getitem__)].kill()
            done = [future.result(LONGEST_PAUSE_S) for future in running]
            assert [stream.texts for stream in done] == undisturbed
            assert all(stream.finish and not stream.error for stream in done)
            assert httpx.get(f"{server.url}/ready").status_code == 200, "the other replica serves"
            [death] = [line for line in server.log[lines_before:] if "has died with" in line]
            taken_over += "with 0 requests" not in death
    until(lambda: sorted(of_replica(server, "radixrt_steps_total")) == ["0", "1"])
    assert server.info(check_invariants=True)["invariants"] == "ok"
    alive = [part for p in server.family() if is_alive(p) for part in p.cmdline()]
    assert alive.count("radixrt.worker") == alive.count("radixrt.scheduler") == 2, (
        "none is left over"
    )
