"""``--dp 2``: the death of one replica loses no answer, and the replica comes back."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import Server
from tests.server.test_takeover import REQUESTS, Stream, is_alive, request, until
from tests.servers import samples

FLAGS = ("--dp", "2", "--dtype", "float32", "--page-size", "4", "--reasoning-parser", "deepseek-r1", "--speculation", "auto")  # fmt: skip
DEATHS = 20 if "RADIXRT_TORTURE" in os.environ else 1
"""Of replicas with open requests."""
LONGEST_PAUSE_S = 20.0
"""Of the slowest test machine. The promise of docs/routing.md is measured by hand."""


def drafted_requests(salt: str) -> list[dict[str, Any]]:
    """With few tokens to choose from, so that many drafts are accepted and as many are not. Under a new salt, since an answer
    that is in the tree would end before its engine dies."""
    sampled = {"temperature": 1.0, "speculation": True, "cache_salt": salt}
    return [
        request(**sampled, seed=20, allowed_token_ids=[70, 71, 72]),
        request(**sampled, seed=21, guided_regex="([ab]{1,3} ){100}", ignore_eos=False),
        request(**sampled, seed=22, allowed_token_ids=[70, 71], presence_penalty=0.5, logprobs=1),
    ]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server(*FLAGS)


def processes(server: Server, name: str) -> dict[str, psutil.Process]:
    """Those that live, by the number of their replica."""
    found = [p for p in server.family() if is_alive(p) and name in p.cmdline()]
    return {p.cmdline()[p.cmdline().index("--replica") + 1]: p for p in found}


def of_replica(server: Server, name: str) -> dict[str, float]:
    """A metric by replica."""
    metrics = samples(httpx.get(f"{server.url}/metrics", timeout=30).text)
    return {dict(labels)["replica"]: v for (n, labels), v in metrics.items() if n == name}


def test_answers_of_a_killed_replica_go_on_with_the_same_tokens(server: Server) -> None:
    with ThreadPoolExecutor(len(REQUESTS) + 3) as threads:
        bodies = [*drafted_requests("undisturbed"), *REQUESTS]
        first = list(threads.map(lambda body: Stream(server, body).run(), bodies))
        undisturbed, taken_over = [stream.texts for stream in first], 0
        for stream in first[:3]:
            details = stream.usage["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 50, details
            assert details["rejected_prediction_tokens"] > 20, details
        while taken_over < DEATHS:
            until(lambda: sorted(of_replica(server, "radixrt_steps_total")) == ["0", "1"])
            bodies = [*drafted_requests(f"death {taken_over}"), *REQUESTS]
            streams, lines_before = [Stream(server, body) for body in bodies], len(server.log)
            running = [threads.submit(stream.run) for stream in streams]
            for stream in streams[:8]:
                stream.wait_for_events()
            busy = of_replica(server, "radixrt_running_requests")
            victim = "radixrt.scheduler" if taken_over % 2 else "radixrt.worker"
            processes(server, victim)[max(busy, key=busy.__getitem__)].kill()
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
