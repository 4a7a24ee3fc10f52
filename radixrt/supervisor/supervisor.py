"""Starts a server's processes, watches them, and ends them together.

The api process outlives engines (:mod:`radixrt.supervisor.engine`). It holds the open requests and
hands them to the next engine (:mod:`radixrt.client.engine_client`).
"""

import contextlib
import logging
import queue
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.child import ServedModel, write_config, write_models
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.link import (
    AddModel,
    CannotStart,
    LoadModel,
    ServerStatus,
    StartReplica,
    ToSupervisor,
    UnloadModel,
)
from radixrt.supervisor.child import Child, Launcher, end_all, to_stderr
from radixrt.supervisor.engine import Engine
from radixrt.supervisor.watch import LOOK_S, Clock

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Engines that end one after the other without a token between them; then the server ends."""


class Supervisor:
    """The processes of one server. Use as a context manager: its exit ends all processes."""

    def __init__(
        self,
        config: ServerConfig,
        listen_socket: socket.socket | None = None,
        max_deaths: int = 1,
        api_stdout: int | None = None,
        show_log: Callable[[str], None] = to_stderr,
        models: Sequence[ServedModel] = (),
    ) -> None:
        """Start all processes; of several models those of the first.

        Args:
            config: of the server, and of its only model, or the first of several.
            listen_socket: listens already; with it the api process is started, too, and owns it
                from then on.
            max_deaths: engines that may end without a token between them. 1: the first death is the
                last.
            api_stdout: where the api process prints its banner; None is this process's standard
                output.
            show_log: takes each line of the processes' logs, in threads.
            models: several models; none: the server has only that of ``config``.
        """
        self._launcher = Launcher(show_log)
        self._max_deaths = max_deaths
        self._api: Child | None = None
        self._clock = Clock()
        self._stopping = self._draining = False
        self.channels = Channels(Channels.make_run_dir())
        write_config(self.channels.run_dir, config)
        if not models:
            one = Engine(config, self.channels, self._launcher, max_deaths, self._tell_api)
            self._engines = [one]
        else:
            write_models(self.channels.run_dir, models)
            self._engines = [
                self._engine_of(model.config, number) for number, model in enumerate(models)
            ]
        try:
            self._engines[0].start_due()
            if listen_socket is not None:
                fd = listen_socket.fileno()
                self._api = self._launcher.start(
                    config,
                    "api",
                    self.channels,
                    "--listen-fd",
                    str(fd),
                    pass_fd=fd,
                    stdout=api_stdout,
                    status=self.status,
                )
                listen_socket.close()  # so that nobody waits for an answer once the api process has ended
        except BaseException:
            self.stop()
            raise

    def _engine_of(self, config: ServerConfig, number: int) -> Engine:
        """The engine of one of several models."""
        channels = self.channels.of_model(number)
        write_config(channels.run_dir, config)
        return Engine(
            config, channels, self._launcher, self._max_deaths, self._tell_api, number, number == 0
        )

    @property
    def status(self) -> ServerStatus:
        """What all processes know of the only model, or the first."""
        return self._engines[0].status

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; the workers of a tensor-parallel engine are worker, worker1,
        worker2, ...; the processes of a replica have its number behind a dot."""
        return {child.label: child.process.pid for child in self._children}

    def wait(self) -> None:
        """Watch until :meth:`stop` is called by another thread, the api process has drained, a
        signal handler raises, or the engine has left the ingress that it has joined.

        Raises:
            ConfigError: a process could not start because of a setting, a checkpoint or the
                machine.
            EngineDiedError: the api process ended on its own, or too many engines did; says which
                process, and the end of its log.
        """
        while (child := self._next_death()) is not None:
            if child is self._api and self._draining:
                return
            if child is self._api:
                raise ConfigError(child.cannot_start) if child.cannot_start else child.death()
            engine = next(one for one in self._engines if child in one.children)
            try:
                if child.cannot_start:
                    raise ConfigError(child.cannot_start)
                engine.replace(child)
            except (ConfigError, EngineDiedError) as error:
                if len(self._engines) == 1 or not self._engines[0].has_served:
                    raise
                log.error("%s is not loaded: %s", engine.config.model_name, error)
                reason = str(error).partition("\n")[0]
                engine.unload(reason.removesuffix(" The end of its log:"))
            if engine.has_left:
                return

    def drain(self) -> None:
        """Ask the api process to finish the open requests and to end; :meth:`wait` returns when it
        has."""
        self._draining = True
        if self._api is not None:
            self._api.process.terminate()

    def reload_keys(self) -> None:
        """Ask the api process to read the key file again."""
        if self._api is not None:
            self._api.process.send_signal(signal.SIGHUP)

    def stop(self, reason: str = "The server was stopped.") -> None:
        """End all processes and remove the sockets. May be called twice.

        Args:
            reason: for the clients whose answers are cut off.
        """
        if self._api is not None and not self._stopping:
            self._api.tell(msgspec.structs.replace(self.status, shutdown_reason=reason))
        self._stopping = True
        self._launcher.news.put(None)
        end_all([*self._children, *self._launcher.ending])
        for engine in self._engines:
            engine.children = []
            for replica in engine.replicas:
                replica.kept.drop()
        self._api = None
        shutil.rmtree(self.channels.run_dir, ignore_errors=True)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EngineDiedError):
            self.stop(f"The engine ended: {str(error).splitlines()[0]}")
        else:
            self.stop()

    @property
    def _children(self) -> list[Child]:
        api = [self._api] if self._api else []
        return [child for engine in self._engines for child in engine.children] + api

    def _tell_api(self, status: ServerStatus) -> None:
        if self._api is not None:
            self._api.tell(status)

    def _next_death(self) -> Child | None:
        """Wait for the unexpected end of a process; None: :meth:`stop` was called."""
        look_at = 0.0
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                news = self._launcher.news.get(timeout=LOOK_S)
                if news is None or self._stopping:
                    return None
                child, message = news
                if message is not None:
                    self._take(child, message)
                elif not child.is_ending:
                    return child
            if (now := time.monotonic()) >= look_at:
                self._look_at_heartbeats(now)
                look_at = now + LOOK_S
            if not self._stopping:
                for engine in self._engines:
                    engine.start_due()
        return None

    def _take(self, child: Child, message: ToSupervisor) -> None:
        match message:
            case LoadModel():
                self._engines[message.model].load()
            case AddModel():
                self._engines.append(self._engine_of(message.config, len(self._engines)))
            case UnloadModel():
                self._engines[message.model].unload()
            case StartReplica():
                self._engines[message.model].take(child, message)
            case _ if child is self._api:
                child.cannot_start = message.reason if isinstance(message, CannotStart) else ""
            case _:  # one whose end is under way is of none
                for engine in self._engines:
                    if child in engine.children:
                        engine.take(child, message)

    def _look_at_heartbeats(self, now: float) -> None:
        """Kill a process that hangs."""
        self._clock.look(now)
        for engine in self._engines:
            engine.look_at_heartbeats(self._clock, now)
        if self._api is not None:
            self._api.kill_if_hung(self._clock, now, is_late=False)
