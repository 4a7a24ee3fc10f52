"""How is each engine started? A command that serves a folder on a port, with the engine's best settings for two cores."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

START_TIMEOUT_S = 600


@dataclass(frozen=True)
class Engine:
    """An OpenAI-compatible server."""

    name: str
    command: tuple[str, ...]
    """With the placeholders {python}, {model} and {port}."""
    environment: dict[str, str] = field(default_factory=dict)
    model_name: str = "model"


def _radixrt(name: str, *flags: str) -> Engine:
    serve = (
        "{python}",
        "-m",
        "radixrt.cli",
        "serve",
        "--model-path",
        "{model}",
        "--port",
        "{port}",
    )
    return Engine(name, (*serve, "--served-model-name", "model", "--log-level", "warning", *flags))


ENGINES = {
    engine.name: engine
    for engine in (
        _radixrt("radixrt"),
        _radixrt("radixrt-int8", "--quantization", "int8"),
        _radixrt("radixrt-int4", "--quantization", "int4"),
        _radixrt("radixrt-no-cache", "--disable-radix-cache"),
    )
}


@contextlib.contextmanager
def serving(engine: Engine, model: Path, log: Path) -> Iterator[str]:
    """Serve ``model`` until the block ends; yields the base URL, which ends in /v1."""
    port = _free_port()
    values = {"python": sys.executable, "model": str(model), "port": str(port)}
    command = [part.format(**values) for part in engine.command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **engine.environment},
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        _wait_until_alive(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_alive(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with status {process.returncode}; see {log}.")
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{process.args!r} did not answer within {START_TIMEOUT_S} s; see {log}.")
