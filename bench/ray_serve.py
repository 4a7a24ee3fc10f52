"""Time to first token of radixrt on Ray Serve, on a local cluster of two node processes, through Ray's proxy and without it.

    make bench-ray
    RAY_SERVE_ENABLE_HA_PROXY=0 RAY_SERVE_THROUGHPUT_OPTIMIZED=0 make bench-ray    # Ray's defaults

The direct requests go to the ingress's own port, so the difference is that of Ray's proxy and of the ingress's. A *bare* application, a deployment that
reads the request and streams a fixed answer, has the time that Ray itself takes.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from starlette.requests import Request
from starlette.responses import StreamingResponse

from bench.local_server import free_port

START_TIMEOUT_S = 300
OBJECT_STORE_BYTES = 100 << 20
"""Of each node."""
FASTEST = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""Settings of Ray that docs/deploy.md recommends; those of the environment come first."""
UNWATCHED = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""For a cluster of a minute: it ends without waiting for a load balancer, and reports nothing to Ray's makers."""


@dataclass
class LocalApp:
    """The application on a cluster of two nodes, which are processes of this machine."""

    url: str
    direct_url: str
    """Of the ingress's api process."""
    bare_url: str

    def engines(self) -> list[psutil.Process]:
        """The actors of the engines that live."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "ServeReplica:radixrt:Engine" in " ".join(process.info["cmdline"] or [])
        ]

    def joined(self) -> int:
        """Engines that the ingress knows."""
        with contextlib.suppress(httpx.HTTPError):
            metrics = httpx.get(f"{self.direct_url}/metrics", timeout=30).text
            return metrics.count("\nradixrt_queued_prefill_seconds{")
        return 0

    def wait_for_engines(self, number: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.joined() != number:
            assert time.monotonic() < deadline, f"{number} engines did not join"
            time.sleep(0.2)


@contextlib.contextmanager
def local_app(engines: int = 2, **settings: Any) -> Iterator[LocalApp]:
    """Start a cluster with one engine on each node, and serve until the block ends."""
    for name, value in {**FASTEST, **UNWATCHED}.items():
        os.environ.setdefault(name, value)  # before Ray is imported, which reads them
    import ray
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": 1,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    # Loopback addresses but 127.0.0.1, which Ray takes for that of the machine on its network.
    head, *others = [f"127.0.0.{number + 2}" for number in range(engines)]
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": head})
    try:
        for address in others:
            cluster.add_node(**node, node_ip_address=address)
        # Of this process alone: its calls of deployments are made outside an event loop.
        os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
        from ray import serve

        from deploy.ray_app import AppArguments, app

        ray.init(
            address=cluster.address,
            namespace="serve",
            log_to_driver=False,
            _node_ip_address=head,
        )
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        arguments = AppArguments(
            min_engines=engines, max_engines=engines, ingress_cpus=0, settings=settings
        )
        handle = serve.run(app(arguments), name="radixrt", route_prefix="/")
        bare = serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})(Bare)
        serve.run(bare.bind(), name="bare", route_prefix="/bare")
        direct = handle.direct_url.remote().result()
        url = f"http://127.0.0.1:{port}"
        made = LocalApp(url, direct, f"{url}/bare")
        made.wait_for_engines(engines)
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


async def _events() -> AsyncIterator[bytes]:
    for _ in range(4):
        yield b'data: {"choices": [{"text": " the"}]}\n\n'


class Bare:
    """Reads the request and streams a fixed answer."""

    async def __call__(self, request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(_events(), media_type="text/event-stream")


def first_token_ms(client: httpx.Client, url: str, prompt: str) -> float:
    """Milliseconds until the first event of a streamed answer."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        lines = response.iter_lines()
        next(lines)
        passed = time.perf_counter() - began
        for _ in lines:  # the connection serves the next request
            pass
    return 1e3 * passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="on each way")
    arguments = parser.parse_args()
    with local_app() as served, httpx.Client(timeout=60) as client:
        urls = (served.url, served.direct_url, served.bare_url)
        times: dict[str, list[float]] = {url: [] for url in urls}
        for number in range(arguments.requests + 10):
            for url, measured in times.items():
                measured.append(first_token_ms(client, url, f"Request {number}: the cat sat on"))
        through, direct, bare = (sorted(measured[10:]) for measured in times.values())
    print("| | median | p90 | p99 |\n|---|---|---|---|")
    for name, values in (("through Ray", through), ("direct", direct), ("bare", bare)):
        quantiles = statistics.quantiles(values, n=100)
        print(f"| {name}, ms | {quantiles[49]:.2f} | {quantiles[89]:.2f} | {quantiles[98]:.2f} |")
    added = statistics.median(through) - statistics.median(direct)
    own = added - statistics.median(bare)
    print(f"added, median: {added:.2f} ms, of which {own:.2f} ms are the ingress's")


if __name__ == "__main__":
    main()
