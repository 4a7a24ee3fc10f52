"""radixrt on a local Ray cluster of two node processes: the death of an engine's actor loses no
answer.

Skipped without Ray; ``make test-ray`` installs it.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.deploy.ray_cluster import LocalApp, local_app
from tests.server.test_replicas import LONGEST_PAUSE_S
from tests.server.test_takeover import REQUESTS, Stream, is_alive, until

pytest.importorskip("ray")

DEATHS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    model = make_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("tiny-llama")))
    settings = {
        "model_path": str(model),
        "dtype": "float32",
        "page_size": 4,
        "reasoning_parser": "deepseek-r1",
        "speculation": "off",
        "served_model_name": "tiny",
    }
    with local_app(**settings) as app:
        yield app


def seconds_of_cpu(engine: psutil.Process) -> float:
    """Of its processes that live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [engine, *engine.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)
    return 0.0


def test_answers_of_a_killed_actor_go_on_with_the_same_tokens(served: LocalApp) -> None:
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        undisturbed = list(threads.map(lambda body: Stream(served, body).run().texts, REQUESTS))
        for _ in range(DEATHS):
            served.wait_for_engines(2)
            before = {engine: seconds_of_cpu(engine) for engine in served.engines()}
            assert len(before) == 2
            streams = [Stream(served, body) for body in REQUESTS]
            running = [threads.submit(stream.run) for stream in streams]
            for stream in streams[:5]:
                stream.wait_for_events()
            busiest = max(before, key=lambda engine: seconds_of_cpu(engine) - before[engine])
            family = [busiest, *busiest.children(recursive=True)]
            busiest.kill()
            done = [future.result(LONGEST_PAUSE_S) for future in running]
            assert [stream.texts for stream in done] == undisturbed
            assert all(stream.finish and not stream.error for stream in done)
            until(lambda family=family: not any(map(is_alive, family)))
            served.wait_for_engines(1)
    served.wait_for_engines(2)


def test_requests_through_ray_are_not_those_of_this_machine(served: LocalApp) -> None:
    """The ingress passes them on from a loopback address, which alone would give them rights."""
    assert httpx.get(f"{served.direct_url}/get_server_info").status_code == 200
    assert httpx.get(f"{served.url}/get_server_info").status_code == 403
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{served.url}/ready", headers={"host": "evil.example"}).status_code == 421


def test_a_client_that_leaves_ends_its_request(served: LocalApp) -> None:
    def aborted() -> int:
        return int(httpx.get(f"{served.direct_url}/get_server_info").json()["stats"]["aborted"])

    before = aborted()
    with httpx.stream("POST", f"{served.url}/v1/completions", json=REQUESTS[0]) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"].startswith("cmpl-")  # then Ray's own
        next(response.iter_lines())
    until(lambda: aborted() == before + 1)
