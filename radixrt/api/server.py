"""Runs the api process: waits for the engine, then serves HTTP on an inherited socket."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import uvicorn
import uvloop
from prometheus_client import Counter
from starlette.types import ASGIApp

from radixrt.api.app import build_app
from radixrt.api.banner import banner
from radixrt.api.http.connection import (
    IDLE_TIMEOUT_S,
    SEND_BUFFER_BYTES,
    Acceptor,
    Connection,
    accepting,
)
from radixrt.api.http.gate import Gate, Throttles, loading_app
from radixrt.api.http.keys import Keys
from radixrt.api.models.front import front_app, start_models
from radixrt.api.state import ServerState
from radixrt.api.tracing import Tracing
from radixrt.base.api_keys import KeySource
from radixrt.base.channels import Channels
from radixrt.base.child import read_models
from radixrt.base.config import MAX_RUNNING_REQUESTS, ServerConfig
from radixrt.base.ipc import LONGEST_WAIT_S
from radixrt.base.liveness.heartbeat import Heartbeat, work_limit_s
from radixrt.base.liveness.link import ServerStatus, SupervisorLink
from radixrt.base.liveness.supervision import end_process, supervise
from radixrt.base.server_url import server_context
from radixrt.client.engine_client import EngineClient

log = logging.getLogger(__name__)

FLUSH_S = 1
"""Seconds in which the last bytes of answers leave, once every request has ended."""

SHUTTING_DOWN = "The server is shutting down."

REASON_S = 1.0
"""Time for which the end at a second signal waits for the supervisor's reason."""

MAX_UNREAD_CHUNKS = 4096
"""Most chunks of each answer that wait for a client that has stopped reading, beyond the socket's
buffers."""


def run_api(
    config: ServerConfig,
    channels: Channels,
    arguments: argparse.Namespace,
    supervisor: SupervisorLink,
) -> None:
    """Serve until a signal to stop."""
    _allow_many_connections()
    gc.freeze()  # the collector need not visit the libraries' objects: that takes some tenths of a second
    uvloop.run(serve(config, channels, socket.socket(fileno=arguments.listen_fd), supervisor))


async def serve(
    config: ServerConfig,
    channels: Channels,
    listen_socket: socket.socket,
    supervisor: SupervisorLink,
) -> None:
    """Serve until a signal to stop.

    Args:
        listen_socket: a listening TCP socket.
    """
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # Accepted sockets inherit it. Without it, a response waits 40 ms for the client's delayed
    # acknowledgement.
    listen_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    served = read_models(channels.run_dir)
    closing = contextlib.AsyncExitStack()

    def connect(number: int, config: ServerConfig) -> EngineClient:
        client = EngineClient(
            channels.of_model(number) if served else channels,
            MAX_UNREAD_CHUNKS,
            config.random_seed,
            end_process,
            supervisor.of_model(number),
        )
        closing.callback(client.close)
        return client

    def trace(config: ServerConfig) -> Tracing | None:
        if config.otlp_endpoint is None:
            return None
        tracing = Tracing(config.otlp_endpoint, config.model_name)
        closing.push_async_callback(asyncio.to_thread, tracing.close)
        return tracing

    supervise(asyncio.create_task(_beat(config, channels)), "The heartbeat")
    try:
        keys = _keys(config)
        throttles = Throttles()
        loading = _http_config(config, loading_app, throttles, Counter("unread", "", registry=None))
        with accepting(listen_socket, loading):
            if served:
                models = await start_models(served, keys, supervisor, connect, trace)
                state, app = (
                    models.all[0].first_state,
                    front_app(config, models, keys, channels.run_dir),
                )
            else:
                client = connect(0, config)
                state = ServerState(config, client, await client.ready(), keys)
                models, app = None, build_app(state, trace(config))
        most = state.info.max_running_requests + config.max_queued_requests
        for other in served[1:]:
            most += MAX_RUNNING_REQUESTS + other.config.max_queued_requests
        gate = Gate(app, most, throttles.starts, state.metrics.refused)
        server = _Server(
            models or state,
            config.shutdown_grace,
            supervisor,
            _http_config(config, gate, throttles, state.metrics.slow_readers),
        )
        address = listen_socket.getsockname()[:2]
        others = [model.config.model_name for model in served[1:]]
        print(
            banner(config, state.info, *address, others=others, needs_key=keys.are_declared),
            flush=True,
        )
        await server.serve(sockets=[listen_socket])
    except asyncio.CancelledError:
        pass
    finally:
        await closing.aclose()


async def _beat(config: ServerConfig, channels: Channels) -> None:
    """Give signs of life as long as the event loop turns."""
    heartbeat = Heartbeat(channels.heartbeat_file("api"))
    while True:
        heartbeat.promise(work_limit_s(config.step_timeout))
        await asyncio.sleep(LONGEST_WAIT_S)


def _http_config(
    config: ServerConfig, app: ASGIApp, throttles: Throttles, slow_readers: Counter
) -> uvicorn.Config:
    debugging = config.log_level == "debug"
    logging.getLogger("uvicorn").setLevel(logging.INFO if debugging else logging.WARNING)
    return uvicorn.Config(
        app,
        http=partial(Connection, throttles=throttles, slow_readers=slow_readers),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=debugging,
        server_header=False,
        proxy_headers=False,  # they are the client's word
        timeout_graceful_shutdown=FLUSH_S,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        ssl_context_factory=_tls(config),
    )


def _tls(config: ServerConfig) -> Callable[..., ssl.SSLContext] | None:
    if config.tls_cert is None:
        return None
    context = server_context(config.tls_cert, config.tls_key)
    return lambda uvicorn_config, default: context


def _keys(config: ServerConfig) -> Keys:
    """The keys of the settings and the environment, which SIGHUP reads again.

    Raises:
        ConfigError: they are not valid.
    """
    source = KeySource.from_config(config, os.environ)
    keys = Keys(source)
    if source.file is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
    if config.api_key is not None:
        log.warning(
            "Other users of this machine can see the key of --api-key in the list of processes: declare keys in a file "
            "(--api-keys), or set RADIXRT_API_KEY."
        )
    return keys


class Draining(Protocol):
    """The requests of a server, which end before it does."""

    is_draining: bool

    async def drain(self, grace_s: float, reason: str) -> None: ...


class _Server(uvicorn.Server):
    """Ends when the open requests are answered, or have had the time that the settings give
    them."""

    def __init__(
        self,
        drained: Draining,
        grace_s: float,
        supervisor: SupervisorLink,
        config: uvicorn.Config,
    ) -> None:
        super().__init__(config)
        self._drained = drained
        self._grace_s = grace_s
        self._supervisor = supervisor
        self._draining: asyncio.Task[None] | None = None
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections at our own pace instead of uvicorn's."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            self._acceptors.append(Acceptor(listener, self.config, self.server_state))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at a signal to stop; at a second one, or when the supervisor says so, end."""
        ending = asyncio.get_running_loop().create_task(self._end_with_server())
        supervise(ending, "The wait for the end of the server", may_return=True)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(signum, self._begin_to_drain)
        yield
        ending.cancel()

    async def _end_with_server(self) -> None:
        """The supervisor does not wait: a drain that has begun ends, too."""
        await self._supervisor.until(_is_ending)
        self._begin_to_drain()

    def _begin_to_drain(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
        is_first = self._draining is None
        self._draining = asyncio.get_running_loop().create_task(self._drain(is_first))
        supervise(self._draining, "The drain", may_return=True)

    async def _drain(self, may_wait: bool) -> None:
        self._drained.is_draining = True
        reason, grace_s = SHUTTING_DOWN, self._grace_s if may_wait else 0.0
        if not may_wait:  # the second signal may come before the supervisor's reason
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._supervisor.until(_is_ending), REASON_S)
        if _is_ending(self._supervisor.status):
            reason, grace_s = self._supervisor.status.shutdown_reason, 0.0
        await self._drained.drain(grace_s, reason)
        self.should_exit = True


def _is_ending(status: ServerStatus) -> bool:
    return bool(status.shutdown_reason)


def _allow_many_connections() -> None:
    """Raise the limit of open files to the system's maximum: each connection is one file, and 1,024
    is a common default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
