"""Engines join a server over TCP: the death of one loses no answer, nor does that of the server's
tokenizer process."""

import os
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from bench.local_server import free_port
from tests.server.conftest import Server
from tests.server.test_replicas import FLAGS as REPLICA_FLAGS
from tests.server.test_replicas import LONGEST_PAUSE_S, of_replica
from tests.server.test_takeover import REQUESTS, Stream, is_alive, process_of, until

FLAGS = REPLICA_FLAGS[2:]
ATTEMPTS = 5
pytestmark = pytest.mark.skipif(
    "RADIXRT_TORTURE" not in os.environ, reason="starts many processes; part of make torture"
)


@dataclass
class Cluster:
    """An ingress without an engine of its own, and two that have joined it."""

    ingress: Server
    start_engine: Callable[[], Server]
    engines: list[Server] = field(default_factory=list)

    def complete(self) -> None:
        """Start the engines that are missing, and wait until both have joined."""
        while len(self.engines) < 2:
            self.engines.append(self.start_engine())
        until(lambda: len(of_replica(self.ingress, "radixrt_steps_total")) == 2, 60)

    def busiest(self) -> Server:
        busy = of_replica(self.ingress, "radixrt_running_requests")
        replica = max(busy, key=busy.__getitem__)
        assert busy[replica] > 0
        return next(engine for engine in self.engines if joined_as(engine)[-1] == replica)


def joined_as(engine: Server) -> list[str]:
    """The numbers that it has had as a replica."""
    return re.findall(r"Joined the ingress .* as replica (\d+)", "".join(engine.log))


@pytest.fixture(scope="module")
def cluster(
    start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    token = tmp_path_factory.mktemp("join") / "token"
    token.write_text(secrets.token_hex(32))
    address = f"tcp://127.0.0.1:{free_port()}"
    common = (*FLAGS, "--join-token-file", str(token))
    engines = [start_server(*common, "--join", address)]  # before there is an ingress
    assert httpx.get(f"{engines[0].url}/ready").status_code == 503
    ingress = start_server(*common, "--dp", "0", "--replica-listen", address)
    return Cluster(ingress, lambda: start_server(*common, "--join", address), engines)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[dict[int, str]]:
    cluster.complete()
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(lambda body: Stream(cluster.ingress, body).run().texts, REQUESTS))


def interrupt(
    cluster: Cluster, undisturbed: list[dict[int, str]], harm: Callable[[Server], None]
) -> None:
    """Harm the busiest engine while it works: all answers are equal to those of an undisturbed
    run."""
    for _ in range(ATTEMPTS):
        cluster.complete()
        streams, lines_before = [Stream(cluster.ingress, b) for b in REQUESTS], len(cluster.ingress.log)  # fmt: skip
        with ThreadPoolExecutor(len(REQUESTS)) as threads:
            running = [threads.submit(stream.run) for stream in streams]
            for stream in streams[:5]:
                stream.wait_for_events()
            harm(cluster.busiest())
            done = [future.result(LONGEST_PAUSE_S) for future in running]
        assert [stream.texts for stream in done] == undisturbed
        assert all(stream.finish and not stream.error for stream in done)
        assert cluster.ingress.info(check_invariants=True)["invariants"] == "ok"
        log = "".join(cluster.ingress.log[lines_before:])
        if any(map(int, re.findall(r"(?:has died|has drained|goes on) with (\d+) requests", log))):
            return
    raise AssertionError(f"all answers had ended before the harm, {ATTEMPTS} times")


@pytest.mark.parametrize("harm", ["suspend", "kill"])
def test_an_engine_that_hangs_or_is_killed_joins_again(
    cluster: Cluster, undisturbed: list[dict[int, str]], harm: str
) -> None:
    harmed: list[psutil.Process] = []

    def harm_scheduler(engine: Server) -> None:
        resume(harmed)
        harmed.append(process_of(engine, "scheduler"))
        getattr(harmed[-1], harm)()

    interrupt(cluster, undisturbed, harm_scheduler)
    resume(harmed)
    cluster.complete()
    assert all(httpx.get(f"{engine.url}/ready").status_code == 200 for engine in cluster.engines)
    if harm == "kill":
        assert 0 in of_replica(cluster.ingress, "radixrt_kv_pages_cached").values()


def resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.resume()


def test_the_death_of_the_tokenizer_process_loses_no_answer(
    cluster: Cluster, undisturbed: list[dict[int, str]]
) -> None:
    """Engines drop what it has sent, and join the next one."""
    cluster.complete()
    schedulers = [process_of(engine, "scheduler") for engine in cluster.engines]
    times_joined = [len(joined_as(engine)) for engine in cluster.engines]
    interrupt(cluster, undisturbed, lambda _: process_of(cluster.ingress, "tokenizer").kill())
    cluster.complete()
    assert all(map(is_alive, schedulers))
    for engine, before in zip(cluster.engines, times_joined, strict=True):
        assert len(joined_as(engine)) > before


def test_an_engine_that_is_stopped_hands_its_answers_over(
    cluster: Cluster, undisturbed: list[dict[int, str]]
) -> None:
    stopped: list[Server] = []

    def stop(engine: Server) -> None:
        engine.process.terminate()
        stopped.append(engine)
        cluster.engines.remove(engine)

    interrupt(cluster, undisturbed, stop)
    assert all(engine.process.wait(20) == 0 for engine in stopped)


def test_an_engine_that_the_ingress_drains_ends_and_its_next_start_joins(
    cluster: Cluster, undisturbed: list[dict[int, str]]
) -> None:
    drained: list[Server] = []

    def drain(engine: Server) -> None:
        replica = {"replica": int(joined_as(engine)[-1])}
        httpx.post(f"{cluster.ingress.url}/v1/replicas/drain", json=replica).raise_for_status()
        drained.append(engine)
        cluster.engines.remove(engine)

    interrupt(cluster, undisturbed, drain)
    assert all(engine.process.wait(20) == 0 for engine in drained)
    cluster.complete()


def test_answers_of_a_killed_engine_go_on_with_the_same_tokens(
    cluster: Cluster, undisturbed: list[dict[int, str]]
) -> None:
    """kill -9 of all its processes."""
    killed: list[psutil.Process] = []

    def kill(engine: Server) -> None:
        cluster.engines.remove(engine)
        family = [psutil.Process(engine.process.pid), *engine.family()]
        for process in family:
            process.kill()
        killed.extend(family)

    interrupt(cluster, undisturbed, kill)
    assert httpx.get(f"{cluster.ingress.url}/ready").status_code == 200
    until(lambda: not any(map(is_alive, killed)))
