"""An engine whose processes are threads of the tests' own process, behind the server of a test or
behind ``LLM``. It takes a tenth of the time to start, and shares this process's imports.

Tests of the processes themselves, of their deaths and of their settings start real ones.
"""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.link import SupervisorLink
from radixrt.offline import background_engine
from radixrt.tokenizer.process import TokenizerProcess
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.servers.compilers import compilers_on_demand
from tests.servers.fake_scheduler import engine_info
from tests.servers.real_engine import RealModel


class Loop:
    """A coroutine in a thread with an event loop of its own."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(make)), daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _run(self, make: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(make())
        self._ready.set()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def failure(self) -> BaseException | None:
        """What has ended the coroutine."""
        done = self._task.done() and not self._task.cancelled()
        return self._task.exception() if done else None

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


class EngineInThreads:
    """The tokenizer process, and a scheduler with its worker.

    Args:
        make_scheduler: called with the channels of the replica; its result can be closed.
    """

    def __init__(
        self, config: ServerConfig, channels: Channels, make_scheduler: Callable[[Channels], Any]
    ) -> None:
        self._run_dir = channels.run_dir
        replica = channels.of_replica(0, 0)
        replica.folder.mkdir()
        # It comes first: threads that import parts of transformers at the same time disturb each other.
        self.vocabulary = Vocabulary.load(config)
        self.scheduler = make_scheduler(replica)

        async def tokenizer() -> None:
            process = TokenizerProcess(config, channels, self.vocabulary, SupervisorLink())
            try:
                await process.run()
            finally:
                process.close()

        self.tokenizer = Loop(tokenizer)

    def stop(self) -> None:
        self.tokenizer.stop()
        self.scheduler.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


class ThreadSupervisor:
    """In place of the supervisor of ``LLM``: starts threads, and says when one of them has failed."""

    def __init__(self, config: ServerConfig) -> None:
        self.channels = Channels(Channels.make_run_dir())
        self.pids: dict[str, int] = {}
        self._stopping = threading.Event()
        self._engine = EngineInThreads(
            config, self.channels, lambda replica: RealModel(replica, engine_info(), config)
        )

    def wait(self) -> None:
        """Until it is stopped.

        Raises:
            ConfigError, EngineDiedError: a thread has failed.
        """
        while not self._stopping.wait(0.05):
            failure = self._engine.tokenizer.failure or self._engine.scheduler.failure
            if isinstance(failure, ConfigError):
                raise failure
            if failure is not None:
                raise EngineDiedError(f"{type(failure).__name__}: {failure}") from failure

    def stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._engine.stop()


@contextlib.contextmanager
def engines_in_threads() -> Iterator[None]:
    """Each ``LLM``, and each engine of a command, that is made in the block."""
    with compilers_on_demand(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_engine, "Supervisor", ThreadSupervisor)
        yield
