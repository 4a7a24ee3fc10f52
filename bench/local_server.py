"""Serves a model on a free port of this machine for as long as a measurement takes."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil

from bench import children
from radixrt.base.errors import ConfigError

START_TIMEOUT_S = 120
PROCESSES = ("api", "tokenizer", "scheduler", "worker")
"""Of a server, apart from the supervisor."""


@contextlib.contextmanager
def local_server(model_path: str, *flags: str) -> Iterator[str]:
    """Serve a model until the block ends; yields the server's URL, without ``/v1``.

    Raises:
        ConfigError: the server did not start; the reason is on stderr.
    """
    with serving(model_path, *flags) as (url, _):
        yield url


@contextlib.contextmanager
def serving(model_path: str, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """As :func:`local_server`, with the server's first process."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "radixrt.cli",
        "serve",
        "--model-path",
        model_path,
        "--port",
        str(port),
        *flags,
    ]
    url = f"http://127.0.0.1:{port}"
    with children.running(command, stdout=subprocess.DEVNULL) as process:
        _wait_until_alive(url, process)
        yield url, process


def free_port() -> int:
    """A port of this machine on which no program listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_pids(url: str) -> dict[str, int]:
    """The processes of the server that listens at this address, in the order of :data:`PROCESSES`."""
    port = str(urlsplit(url).port)
    pids: dict[str, int] = {}
    for supervisor in psutil.process_iter(["cmdline"]):
        if port in (supervisor.info["cmdline"] or ()):
            for process in supervisor.children(recursive=True):
                pids |= {
                    name: process.pid
                    for name in PROCESSES
                    if f"radixrt.{name}" in process.cmdline()
                }
    return {name: pids[name] for name in PROCESSES}


def _wait_until_alive(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health").close()
            return
        time.sleep(0.05)
    raise ConfigError("The server for the measurement did not start.")
