"""Ten thousand connections at once, idle ones, slow ones, and streams that nobody reads (``make
torture``).

The figures that it prints (``-s``) are those of docs/internals/reliability.md. Times depend on the
machine, so the bounds are wide.
"""

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.servers import Server, flood_client, serving

pytestmark = pytest.mark.skipif(
    "RADIXRT_TORTURE" not in os.environ, reason="minutes of load: make torture"
)

PROBES = ("/health", "/ready", "/metrics")


@pytest.fixture(scope="module")
def flooded() -> Iterator[Server]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flags = ["--max-total-tokens", "65536", "--max-running-requests", "64", "--max-queued-requests", "256"]  # fmt: skip
    with serving("demo", "--served-model-name", "demo", *flags) as server:
        yield server
        assert "Traceback" not in "".join(server.log)


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def api_of(server: Server) -> psutil.Process:
    return next(p for p in server.family() if "radixrt.api" in p.cmdline())


@dataclass
class Bystanders:
    """A client that streams, and probes, while something happens to the server."""

    server: Server
    gaps: list[float] = field(default_factory=list)
    """Seconds between two lines of the stream."""
    probes: dict[str, list[float]] = field(default_factory=lambda: {path: [] for path in PROBES})
    """Seconds to the answer on a new connection."""
    problems: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port_of(self.server), timeout=60)

    def stream(self) -> None:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not self._stop.is_set():
            with contextlib.closing(self.connect()) as client:
                client.request("POST", "/v1/completions", json.dumps(body))
                response = client.getresponse()
                if response.status != 200:
                    time.sleep(0.1)  # the server is full
                    continue
                last = time.monotonic()
                while response.readline() and not self._stop.is_set():
                    now = time.monotonic()
                    self.gaps.append(now - last)
                    last = now

    def probe(self, path: str) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            with contextlib.closing(self.connect()) as client:
                client.request("GET", path)
                if (status := client.getresponse().status) != 200:
                    self.problems.append(f"{path}: {status}")
            self.probes[path].append(time.monotonic() - begin)
            time.sleep(0.05)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.stream)]
        threads += [threading.Thread(target=self.probe, args=(path,)) for path in PROBES]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(90)

    def figures(self) -> dict[str, float]:
        slowest = {path: round(max(times), 3) for path, times in self.probes.items()}
        return {"largest gap": round(max(self.gaps), 3)} | slowest


def assert_undisturbed(seen: Bystanders, most_s: float, most_probe_s: float | None = None) -> None:
    """The largest gap of a stream and the slowest probe have these bounds; by default the same."""
    assert not seen.problems
    assert max(seen.gaps) < most_s, seen.figures()
    assert max(map(max, seen.probes.values())) < (most_probe_s or most_s), seen.figures()


def assert_recovers(server: Server, open_files: int) -> None:
    """No connection, no sequence and no page is left over."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = server.info(check_invariants=True)["stats"]
        left = stats["running"] + stats["waiting"]
        if not left and api_of(server).num_fds() <= open_files + 10:
            return
        time.sleep(0.5)
    raise AssertionError(f"{left} sequences, {api_of(server).num_fds()} files (was {open_files})")


def test_ten_thousand_requests_at_once(flooded: Server) -> None:
    """Each is answered: some with 200, the others at once with 503."""
    api, seen = api_of(flooded), Bystanders(flooded)
    open_files, memory = api.num_fds(), api.memory_info().rss
    with seen.watching():
        time.sleep(1)
        command = [sys.executable, flood_client.__file__, "--port", str(port_of(flooded)), "--count", "10000", "--seconds", "120"]  # fmt: skip
        output = subprocess.run(command, capture_output=True, check=True, timeout=180).stdout
        grown = (api.memory_info().rss - memory) >> 20
        time.sleep(1)
    result = json.loads(output)
    print("\n10,000 at once:", result, seen.figures(), f"api +{grown} MiB")
    assert result["unanswered"] == 0 and {*result["statuses"]} == {"200", "503"}
    slowest_s = max(result["slowest_s"].values())
    # The system queues connections: a probe's is accepted after those that came before it.
    assert_undisturbed(seen, max(1.0, slowest_s / 2), most_probe_s=max(1.0, slowest_s))
    assert grown < 512
    assert_recovers(flooded, open_files)


def test_batches_beyond_the_time_of_the_queue() -> None:
    """Each is answered as a whole, or refused before any of it runs."""
    batch = {"prompt": ["Once"] * 6, "n": 2, "max_tokens": 40, "ignore_eos": True}
    flags = ["--max-running-requests", "4", "--max-queue-seconds", "0.5"]
    with (
        serving("demo", *flags) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(24) as clients,
    ):

        def send(number: int) -> str:
            response = http.post("/v1/completions", json=batch | {"cache_salt": f"{number}"})
            if response.status_code == 200:
                assert len(response.json()["choices"]) == 12
                return "answered"
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            message = response.json()["error"]["message"]
            return "refused at once" if "would wait" in message else "refused after the wait"

        warm_up = [send(-number) for number in range(1, 9)]
        counts = Counter(clients.map(send, range(200)))
        stats = server.info(check_invariants=True)["stats"]
    print("\nbatches:", dict(counts))
    assert warm_up == ["answered"] * 8, "one after the other"
    assert counts["answered"] >= 5 and counts.total() - counts["answered"] >= 20
    assert stats["output_tokens"] == (8 + counts["answered"]) * 12 * 40
    assert stats["running"] == stats["waiting"] == 0


def test_ten_thousand_idle_and_a_thousand_slow_connections(flooded: Server) -> None:
    api, seen = api_of(flooded), Bystanders(flooded)
    open_files, memory = api.num_fds(), api.memory_info().rss
    address = ("127.0.0.1", port_of(flooded))
    with contextlib.ExitStack() as stack:
        for _ in range(10_000):
            stack.enter_context(socket.create_connection(address, timeout=30))
        slow = [stack.enter_context(socket.create_connection(address)) for _ in range(1000)]
        for client in slow:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        with seen.watching():
            for _ in range(5):
                time.sleep(1)
                for client in slow:
                    client.send(b"X")
        grown = (api.memory_info().rss - memory) >> 20
        print("\n10,000 idle, 1,000 slow:", seen.figures(), f"api +{grown} MiB")
    assert_undisturbed(seen, 2)
    assert grown < 256
    assert_recovers(flooded, open_files)


def test_streams_that_nobody_reads(flooded: Server) -> None:
    """16 streams of answers that no buffer takes: they are cut off, and their sequences end."""
    api, seen = api_of(flooded), Bystanders(flooded)
    open_files, memory = api.num_fds(), api.memory_info().rss
    body = json.dumps({"prompt": "Once", "n": 2, "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 5})  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port_of(flooded)))
            client.sendall((head + body).encode())
        with seen.watching():
            time.sleep(5)
            deadline, most = time.monotonic() + 150, 0
            while time.monotonic() < deadline and api.num_fds() > open_files + 8:
                time.sleep(1)
                most = max(most, api.memory_info().rss)
        assert api.num_fds() <= open_files + 8  # they are cut off though the clients are there
    print("\n16 unread streams:", seen.figures(), f"api +{(most - memory) >> 20} MiB")
    assert_undisturbed(seen, 5)
    assert (most - memory) >> 20 < 256
    assert_recovers(flooded, open_files)
