"""Serves radixrt by Ray on a local cluster of node processes, for as long as a test takes."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from bench.local_server import free_port

START_TIMEOUT_S = 300
OBJECT_STORE_BYTES = 100 << 20
"""Of each node."""
FASTEST = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""Settings of Ray that docs/deploy.md recommends; those of the environment come first."""
UNWATCHED = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""For a cluster of a minute: it ends without waiting for a load balancer, and reports nothing to
Ray's makers."""


@dataclass
class LocalApp:
    """The application on a cluster of two nodes, which are processes of this machine."""

    url: str
    direct_url: str
    """Of the ingress's api process."""

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
        direct = handle.direct_url.remote().result()
        made = LocalApp(f"http://127.0.0.1:{port}", direct)
        made.wait_for_engines(engines)
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
