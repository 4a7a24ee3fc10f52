"""Runs an engine's processes and its client in the background of a program without an event
loop."""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.supervision import run_loop, start_thread
from radixrt.client.engine_client import EngineClient
from radixrt.messages.answers import EngineInfo
from radixrt.supervisor.supervisor import Supervisor

Result = TypeVar("Result")

PATIENCE_S = 2.0
"""Longest wait of :meth:`BackgroundEngine.close` for tasks in flight to end."""


class BackgroundEngine:
    """Starts the processes, runs the client's event loop in a thread, and notices when a process
    dies."""

    def __init__(self, config: ServerConfig) -> None:
        """Start, and wait until requests can be taken.

        Raises:
            ConfigError: a setting, the checkpoint or the machine makes it impossible.
            EngineDiedError: a process ended.
        """
        self._failure: Exception | None = None
        self._random_seed = config.random_seed
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._supervisor = Supervisor(config)
        try:
            start_thread(run_loop, self._loop, name="radixrt-client", on_failure=self._fail)
            self.client: EngineClient = self.run(self._make_client())
            start_thread(self._watch, name="radixrt-watch", on_failure=self._fail)
            self.info: EngineInfo = self.run(self.client.ready())
        except EngineDiedError as error:
            self.close()
            raise self._failure or error from None
        except BaseException:  # Ctrl-C, most likely
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return self._supervisor.pids

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Run a coroutine in the client's loop.

        Raises:
            EngineDiedError: the engine was closed.
        """
        if self._closed:
            coroutine.close()
            raise EngineDiedError("This engine was closed; make a new one.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the client's loop and wait for its result. An interrupted wait cancels
        it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncGenerator[Result, None]) -> Iterator[Result]:
        """Yield the items of an iterator that runs in the client's loop. Leaving early closes the
        iterator."""
        arrived: queue.SimpleQueue[tuple[Result] | BaseException | None] = queue.SimpleQueue()

        async def forward() -> None:
            try:
                async for item in source:
                    arrived.put((item,))
                arrived.put(None)
            except Exception as error:
                arrived.put(error)
            finally:
                await source.aclose()

        task = self.submit(forward())
        try:
            while (arrival := arrived.get()) is not None:
                if isinstance(arrival, BaseException):
                    raise arrival
                yield arrival[0]
        finally:
            task.cancel()

    def close(self) -> None:
        """Stop all processes; fail the requests in flight. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._supervisor.stop()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._close_client(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            while self._loop.is_running():
                threading.Event().wait(0.001)
        self._loop.close()

    async def _make_client(self) -> EngineClient:
        return EngineClient(self._supervisor.channels, random_seed=self._random_seed)

    async def _close_client(self) -> None:
        if hasattr(self, "client"):
            self.client.engine_died("The engine was closed.")
            self.client.close()
        in_flight = asyncio.all_tasks() - {asyncio.current_task()}
        if in_flight:  # they end within some iterations of the loop
            await asyncio.wait(in_flight, timeout=PATIENCE_S)

    def _watch(self) -> None:
        try:
            self._supervisor.wait()
        except (ConfigError, EngineDiedError) as error:
            self._failure = error
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        """Fail the requests in flight and those to come."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self.client.engine_died, reason)
