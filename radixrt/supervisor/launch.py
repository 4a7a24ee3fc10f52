"""The supervisor: checks the settings, starts the processes of an engine, watches them and ends them together."""

import contextlib
import dataclasses
import errno
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from radixrt.base.child import CONFIG_ERROR_FILE, EXIT_CONFIG_ERROR, write_config
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.ipc import Channels
from radixrt.models.checkpoint import (
    check_checkpoint,
    generation_config,
    resolve_model_path,
    served_context_length,
)

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 40
STOP_TIMEOUT_S = 5.0

SHORT_SPINS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
"""Settings of OpenMP's libraries, which torch uses on a CPU. By default their threads spin for milliseconds after each
operation, on cores that the native kernels and the other processes need."""


@dataclass(eq=False)
class _Child:
    name: str
    process: subprocess.Popen[str]
    log_tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL_LINES))

    def follow_log(self, ended: "queue.SimpleQueue[_Child | None]") -> None:
        """Copy the child's log to stderr and keep its end; report the end of the child."""
        assert self.process.stderr is not None
        for line in self.process.stderr:  # to the end: a full pipe would block the child
            self.log_tail.append(line)
            with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone
                sys.stderr.write(line)
                sys.stderr.flush()
        self.process.wait()
        ended.put(self)


class Supervisor:
    """The processes of one engine. Use it as a context manager, so that no process is left behind."""

    def __init__(self, config: ServerConfig, listen_socket: socket.socket | None = None) -> None:
        """Start all processes; with ``listen_socket``, bound but not listening, also the api process."""
        self.channels = Channels(Channels.make_run_dir())
        self._ended: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._parent_pipe = os.pipe()  # children see its end when this process is gone
        self._stopping = False
        write_config(self.channels.run_dir, config)
        try:
            for rank in range(config.tp):
                self._start("worker", "--rank", str(rank), rank=rank)
            self._start("scheduler")
            self._start("tokenizer")
            if listen_socket is not None:
                fd = listen_socket.fileno()
                self._start("api", "--listen-fd", str(fd), pass_fd=fd)
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, *arguments: str, rank: int = 0, pass_fd: int | None = None) -> None:
        parent_fd = self._parent_pipe[0]
        # -P: a file of the user's folder called http.py must not stand in for the standard library's
        command = [sys.executable, "-P", "-m", f"radixrt.{name}"]
        own = ["--run-dir", str(self.channels.run_dir), "--parent-fd", str(parent_fd)]
        process = subprocess.Popen(
            [*command, *own, *arguments],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            text=True,
            errors="replace",
            pass_fds=[parent_fd] if pass_fd is None else [parent_fd, pass_fd],
            process_group=0,  # Ctrl-C is the supervisor's to handle
        )
        child = _Child(name if rank == 0 else f"{name}{rank}", process)
        self._children.append(child)
        threading.Thread(target=child.follow_log, args=(self._ended,), daemon=True).start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; the workers of a tensor-parallel engine are worker, worker1, worker2, ..."""
        return {child.name: child.process.pid for child in self._children}

    def wait(self) -> None:
        """Block until :meth:`stop` is called by another thread, or a signal handler raises.

        Raises:
            ConfigError: a process could not start because of a setting, a checkpoint or the machine.
            EngineDiedError: a process ended on its own; has its name and the end of its log. The engine's state is
                spread over all processes, so the others cannot continue.
        """
        child = self._ended.get()
        if child is None or self._stopping:
            return
        status = child.process.returncode
        if status == EXIT_CONFIG_ERROR:
            raise ConfigError((self.channels.run_dir / CONFIG_ERROR_FILE).read_text())
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )
        tail = "".join(f"    {line}" for line in child.log_tail)
        raise EngineDiedError(
            f"The {child.name} process {how}. The end of its log:\n{tail or '    (empty)'}"
        )

    def stop(self) -> None:
        """End all processes and remove the sockets. May be called twice."""
        self._stopping = True
        self._ended.put(None)
        for child in self._children:
            child.process.terminate()
        for child in self._children:
            try:
                child.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        for fd in self._parent_pipe:
            os.close(fd)
        self._parent_pipe, self._children = (), []  # type: ignore[assignment]
        shutil.rmtree(self.channels.run_dir, ignore_errors=True)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """The children's environment: they import radixrt from the same place. The user's settings are not changed."""
    package_parent = str(Path(__file__).parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**SHORT_SPINS, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def prepare(config: ServerConfig) -> ServerConfig:
    """Check the settings and the checkpoint before any process starts; a hub id becomes a folder.

    Raises:
        ConfigError: says what to change.
    """
    config.validate()
    model_dir = resolve_model_path(config.model_path)
    model_config = check_checkpoint(model_dir, config.load_format, config.quantization)
    served_context_length(model_config, config.context_length)
    generation_config(model_dir)
    tokenizer_path = config.tokenizer_path
    if tokenizer_path is not None:
        tokenizer_path = str(resolve_model_path(tokenizer_path, "--tokenizer-path"))
    return dataclasses.replace(
        config,
        model_path=str(model_dir),
        tokenizer_path=tokenizer_path,
        served_model_name=config.model_name,
    )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the engine is ready.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use by another program; choose one with --port."
            ) from None
        raise ConfigError(
            f"Cannot listen on {host}:{port} ({error.strerror}); check --host and --port."
        ) from None
    return listener


def serve(config: ServerConfig) -> int:
    """Run a server until SIGINT or SIGTERM; returns the exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt_once)
    try:
        config = prepare(config)
        with bind(config.host, config.port) as listener, Supervisor(config, listener) as supervisor:
            supervisor.wait()
    except KeyboardInterrupt:
        return 0
    except (ConfigError, EngineDiedError) as error:
        print(f"radixrt: {error}", file=sys.stderr)
        return 1
    return 0


def _interrupt_once(signum: int, frame: object) -> None:
    """Begin to stop; a second Ctrl-C must not leave half of the processes behind."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
