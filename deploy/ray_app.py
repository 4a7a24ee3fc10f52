"""radixrt on Ray Serve: an ingress, and engines on the nodes of a cluster that join it.
docs/deploy.md says how to run it."""

import asyncio
import dataclasses
import math
import os
import secrets
import threading
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import ray
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext
from starlette.requests import Request
from starlette.responses import StreamingResponse
from yarl import URL

from radixrt.base.config import ServerConfig
from radixrt.supervisor.launch import bind, prepare
from radixrt.supervisor.probes import is_joined
from radixrt.supervisor.supervisor import MAX_DEATHS, Supervisor

QUEUED_PREFILL_S = 2.0
"""Seconds of queued prompts for each engine that autoscaling aims at."""

METRIC = "radixrt_queued_prefill_seconds"

LOOK_S = 0.2
"""Time between two looks whether an engine has joined."""

MAX_OPEN_REQUESTS = 10_000
"""radixrt has limits of its own (--max-queued-requests), and says no with a reason."""

OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length"}
"""Headers that a proxy does not pass on."""


class AppArguments(BaseModel):
    """Arguments of ``serve run deploy.ray_app:app NAME=VALUE``."""

    min_engines: int = 1
    max_engines: int = 1
    gpus: bool = False
    """Each engine has ``tp`` GPUs."""
    cpus: float = 1.0
    """CPUs of each engine."""
    ingress_cpus: float = 1.0
    settings: dict[str, Any] = {}
    """Settings of the server, as in the file of --config, with underscores: model_path, tp, dtype,
    …"""


class Link(NamedTuple):
    """What an engine needs to join the ingress."""

    address: str
    token: str


class Supervised:
    """The processes of an ingress or an engine. They end with this process, however it ends."""

    def __init__(self, config: ServerConfig, token: str, *, answers_clients: bool) -> None:
        """
        Args:
            answers_clients: start an api process, too.

        Raises:
            ConfigError: says what to change.
        """
        self._token = os.memfd_create("radixrt-join-token")  # a file that ends with this process
        os.write(self._token, token.encode())
        file = f"/proc/{os.getpid()}/fd/{self._token}"
        self.config = prepare(dataclasses.replace(config, join_token_file=file))
        listener = bind("127.0.0.1", 0) if answers_clients else None
        self.port = listener.getsockname()[1] if listener else 0
        self.supervisor = Supervisor(self.config, listener, MAX_DEATHS)
        self.error: BaseException | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self.supervisor.wait()
            self.error = RuntimeError("The processes were drained.")
        except Exception as error:
            self.error = error

    def check(self) -> None:
        """Raises the error that has ended the processes, if they have ended."""
        if self.error is not None:
            raise self.error


@serve.deployment(num_replicas=1, max_ongoing_requests=MAX_OPEN_REQUESTS)
class Ingress:
    """Api, tokenizer process and router, and a proxy to them from Ray's own proxies."""

    async def __init__(self, settings: dict[str, Any], engines: object) -> None:
        """
        Args:
            engines: their deployment, which belongs to the application because it is named here.
        """
        host = ray.util.get_node_ip_address()
        listener = bind(host, 0)  # a free port
        port = listener.getsockname()[1]
        listener.close()
        self._link = Link(f"tcp://{host}:{port}", secrets.token_hex(32))
        config = ServerConfig(
            **{**settings, "dp": 0, "tp": 1, "replica_listen": self._link.address}
        )
        self._processes = await asyncio.to_thread(
            Supervised, config, self._link.token, answers_clients=True
        )
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
            skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            auto_decompress=False,
        )

    def check_health(self) -> None:
        self._processes.check()

    def link(self) -> Link:
        return self._link

    def direct_url(self) -> str:
        """Address of the api process, for programs on the ingress's node."""
        return f"http://127.0.0.1:{self._processes.port}"

    async def queued_prefill_seconds(self) -> float:
        """Over all engines."""
        headers = _authorization(self._processes.config)
        async with self._http.get(f"{self.direct_url()}/metrics", headers=headers) as response:
            response.raise_for_status()
            families = text_string_to_metric_families(await response.text())
        return sum(s.value for family in families for s in family.samples if s.name == METRIC)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on. The header says to the api that its client is not on this machine."""
        headers = [
            (name.decode(), value.decode(errors="replace"))  # aiohttp encodes them as UTF-8
            for name, value in request.headers.raw
            if name.decode() not in OF_THE_CONNECTION
        ]
        client = request.client.host if request.client else "unknown"
        headers.append(("x-forwarded-for", client))
        url = f"{self.direct_url()}{quote(request.url.path)}?{request.url.query}"
        response = await self._http.request(
            request.method,
            URL(url, encoded=True),
            headers=headers,
            data=await request.body() or None,
            allow_redirects=False,
        )

        async def body() -> AsyncIterator[bytes]:
            async with response:  # a client that is gone ends the connection
                async for piece in response.content.iter_any():
                    yield piece

        answer = StreamingResponse(body(), response.status)
        answer.raw_headers = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.decode().lower() not in OF_THE_CONNECTION
        ]
        return answer


def by_queued_prefill(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many engines as compute the queued prompts in QUEUED_PREFILL_S; Serve applies bounds and
    delays to it."""
    told = (context.aggregated_metrics or {}).get(METRIC)
    if not told:
        return context.target_num_replicas, {}
    return math.ceil(max(told.values()) / QUEUED_PREFILL_S), {}


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=10)
class Engine:
    """A scheduler with its workers, which joins the ingress of its application."""

    async def __init__(self, settings: dict[str, Any]) -> None:
        application = serve.get_replica_context().app_name
        self._ingress = serve.get_deployment_handle("Ingress", application)
        self._link = Link(*await self._ingress.link.remote())
        config = ServerConfig(**{**settings, "join": self._link.address})
        self._processes = await asyncio.to_thread(
            Supervised, config, self._link.token, answers_clients=False
        )
        while not is_joined(self._processes.supervisor.channels):
            self._processes.check()
            await asyncio.sleep(LOOK_S)

    async def check_health(self) -> None:
        """Raises an error if the processes have ended, or the ingress is elsewhere now: Serve then
        starts another engine."""
        self._processes.check()
        if Link(*await self._ingress.link.remote()) != self._link:
            raise RuntimeError("The ingress was started again at another address.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Seconds over all engines: each says the same."""
        return {METRIC: await self._ingress.queued_prefill_seconds.remote()}

    def __del__(self) -> None:
        if hasattr(self, "_processes"):
            self._processes.supervisor.stop()


def app(arguments: AppArguments) -> Application:
    """The application that ``serve run deploy.ray_app:app`` starts."""
    config = ServerConfig(**arguments.settings).validate()
    # One bundle: the workers of an engine are its children, on the same node.
    bundle = {"CPU": arguments.cpus} | ({"GPU": float(config.tp)} if arguments.gpus else {})
    engines = Engine.options(
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": bundle.get("GPU", 0.0)},
        autoscaling_config={
            "min_replicas": arguments.min_engines,
            "max_replicas": arguments.max_engines,
            "metrics_interval_s": 2,
            "policy": {"policy_function": by_queued_prefill},
        },
    ).bind(arguments.settings)
    ingress = Ingress.options(ray_actor_options={"num_cpus": arguments.ingress_cpus})
    return ingress.bind(arguments.settings, engines)


def _authorization(config: ServerConfig) -> dict[str, str]:
    """An admin's key, without which a server with keys shows no metrics."""
    key = os.environ.get("RADIXRT_API_KEY", config.api_key)
    return {} if key is None else {"authorization": f"Bearer {key}"}
