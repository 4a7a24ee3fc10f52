"""Real servers: all processes, on loopback."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from bench.local_server import free_port
from tests.checkpoints import make_checkpoint, make_tokenizer

START_TIMEOUT_S = 180


@dataclass
class Server:
    """A server in processes of its own."""

    process: subprocess.Popen[str]
    url: str
    temp_dir: Path
    """Where it keeps its sockets."""
    log: list[str] = field(default_factory=list)

    def start(self) -> "Server":
        threading.Thread(target=self._read_log, daemon=True).start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            assert self.process.poll() is None, "".join(self.log)
            time.sleep(0.1)
        raise AssertionError("the server did not start:\n" + "".join(self.log))

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)

    def family(self) -> list[psutil.Process]:
        """The supervisor's children."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def info(self, check_invariants: bool = False) -> dict:
        params = {"check_invariants": "true"} if check_invariants else {}
        response = httpx.get(f"{self.url}/get_server_info", params=params, timeout=30)
        assert response.status_code == 200, response.text
        return response.json()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


@pytest.fixture(scope="session")
def served_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return make_tokenizer(make_checkpoint("llama", folder))


def run_server(model: Path, *flags: str, cwd: Path | None = None) -> Server:
    """Start, without waiting."""
    port = free_port()
    command = [
        sys.executable,
        "-P",
        "-m",
        "radixrt.launch_server",
        "--model-path",
        str(model),
        "--port",
        str(port),
        *flags,
    ]
    temp_dir = Path(
        tempfile.mkdtemp(prefix="rx")
    )  # a short path: pytest's own are too long for sockets
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temp_dir)},
        cwd=cwd,
    )
    return Server(process, f"http://127.0.0.1:{port}", temp_dir)


@pytest.fixture(scope="session")
def start_server(served_checkpoint: Path) -> Iterator[Callable[..., Server]]:
    """``start_server("--page-size", "1")``: a server that answers; stopped at the end of the session."""
    started: list[Server] = []

    def start(*flags: str) -> Server:
        server = run_server(served_checkpoint, "--served-model-name", "tiny", *flags)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()
        shutil.rmtree(server.temp_dir)


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    """One server that many tests share."""
    return start_server("--page-size", "4", "--max-total-tokens", "8192")
