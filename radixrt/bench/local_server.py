"""A server of one's own for a measurement, on a free port of this machine."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from radixrt.base.errors import ConfigError

START_TIMEOUT_S = 120


@contextlib.contextmanager
def local_server(model_path: str, *flags: str) -> Iterator[str]:
    """Serve a model until the block ends; yields the server's URL, without ``/v1``.

    Raises:
        ConfigError: the server did not start; it has said why on stderr.
    """
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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_alive(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """One of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_alive(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health").close()
            return
        time.sleep(0.05)
    raise ConfigError("The server for the measurement did not start.")
