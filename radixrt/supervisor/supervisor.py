"""Starts a server's processes, watches them, and ends them together.

The api process outlives engines (:mod:`radixrt.supervisor.engine`). It holds the open requests and
hands them to the next engine (:mod:`radixrt.client.engine_client`).
"""

import contextlib
import queue
import shutil
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.child import write_config
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.link import ServerStatus
from radixrt.supervisor.child import Child, Launcher, end_all, to_stderr
from radixrt.supervisor.engine import Engine
from radixrt.supervisor.watch import LOOK_S, Clock

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
    ) -> None:
        """Start all processes.

        Args:
            listen_socket: listens already; with it the api process is started, too, and owns it
                from then on.
            max_deaths: engines that may end without a token between them. 1: the first death is the
                last.
            api_stdout: where the api process prints its banner; None is this process's standard
                output.
            show_log: takes each line of the processes' logs, in threads.
        """
        self._launcher = Launcher(show_log)
        self._api: Child | None = None
        self._clock = Clock()
        self._stopping = self._draining = False
        self.channels = Channels(Channels.make_run_dir())
        self._engine = Engine(config, self.channels, self._launcher, max_deaths, self._tell_api)
        write_config(self.channels.run_dir, config)
        try:
            self._engine.start_due()
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

    @property
    def status(self) -> ServerStatus:
        """What all processes know."""
        return self._engine.status

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
            if child.cannot_start:
                raise ConfigError(child.cannot_start)
            if child is self._api:
                raise child.death()
            self._engine.replace(child)
            if self._engine.has_left:
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
        self._engine.children, self._api = [], None
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
        return [*self._engine.children, *([self._api] if self._api else [])]

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
                    self._engine.take(child, message)
                elif not child.is_ending:
                    return child
            if (now := time.monotonic()) >= look_at:
                self._look_at_heartbeats(now)
                look_at = now + LOOK_S
            if not self._stopping:
                self._engine.start_due()
        return None

    def _look_at_heartbeats(self, now: float) -> None:
        """Kill a process that hangs."""
        self._clock.look(now)
        self._engine.look_at_heartbeats(self._clock, now)
        if self._api is not None:
            self._api.kill_if_hung(self._clock, now, is_late=False)
