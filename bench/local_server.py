"""Serves a model on a free port of this machine for as long as a measurement takes."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench import children
from radixrt.base.errors import ConfigError

START_TIMEOUT_S = 120
PROCESSES = ("api", "tokenizer", "scheduler", "worker")
"""The kinds of processes of a server, apart from the supervisor."""


@contextlib.contextmanager
def local_server(model_path: str, *flags: str) -> Iterator[str]:
    """Serve a model until the block ends; yields the server's URL, without ``/v1``. It computes
    every answer: a replayed one would measure nothing.

    Raises:
        ConfigError: the server did not start; the reason is on stderr.
    """
    port = free_port()
    command = [sys.executable, "-m", "radixrt.cli", "serve", "--model-path", model_path]
    command += ["--port", str(port), "--disable-shared-answers", *flags]
    url = f"http://127.0.0.1:{port}"
    with children.running(command, stdout=subprocess.DEVNULL) as process:
        if not comes_alive(f"{url}/health", process, START_TIMEOUT_S):
            raise ConfigError("The server for the measurement did not start.")
        yield url


def check_computed(usage: Mapping[str, Any]) -> None:
    """
    Raises:
        RuntimeError: tokens of an answer were not computed for it, so its time says nothing.
    """
    if replayed := usage.get("replayed_tokens"):
        raise RuntimeError(
            f"{replayed} tokens were replayed; start the server with --disable-shared-answers."
        )


def free_port() -> int:
    """A port of this machine on which no program listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_processes(url: str) -> dict[str, list[psutil.Process]]:
    """The processes of the server at this address, by kind, in the order of :data:`PROCESSES`."""
    port = str(urlsplit(url).port)
    found: dict[str, list[psutil.Process]] = {name: [] for name in PROCESSES}
    for supervisor in psutil.process_iter(["cmdline"]):
        if port in (supervisor.info["cmdline"] or ()):
            for process in supervisor.children(recursive=True):
                for name in PROCESSES:
                    if f"radixrt.{name}" in process.cmdline():
                        found[name].append(process)
    return found


class CpuClock:
    """The CPU time of the servers at some URLs, which count as one."""

    def __init__(self, urls: Sequence[str]) -> None:
        servers = [server_processes(url) for url in urls]
        self._processes = {name: [p for s in servers for p in s[name]] for name in PROCESSES}

    def by_process(self) -> dict[str, float]:
        """Seconds used so far, by kind of process."""
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in self._processes.items()
        }

    def seconds(self) -> float:
        """Seconds used so far by all processes."""
        return sum(self.by_process().values())


def comes_alive(url: str, process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Wait until ``url`` answers a GET; false: the process has ended, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return True
        time.sleep(0.05)
    return False
