"""Servers of the tests, in processes of their own on loopback."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench import children
from bench.local_server import free_port

START_TIMEOUT_S = 180
SHARES_ANSWERS = "(shares answers)"
"""A mark among the flags of a server: equal answers are computed once, as they are by default."""
POLL_S = 0.1


@dataclass
class Server:
    """A server in processes of its own."""

    process: subprocess.Popen[str]
    url: str
    temp_dir: Path
    """The folder of its sockets."""
    log: list[str] = field(default_factory=list)

    def start(self) -> "Server":
        """Wait until it answers."""
        threading.Thread(target=self._read_log, daemon=True).start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            # Not httpx.get, which loads all certificates for every request.
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return self
            assert self.process.poll() is None, "".join(self.log)
            time.sleep(POLL_S)
        raise AssertionError("the server did not start:\n" + "".join(self.log))

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)

    def family(self) -> list[psutil.Process]:
        """The supervisor's children, without those that have ended and are not yet waited for."""
        children, running = psutil.Process(self.process.pid).children(recursive=True), []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    running.append(child)
        return running

    def info(self, check_invariants: bool = False) -> dict:
        """The answer of ``/get_server_info``."""
        params = {"check_invariants": "true"} if check_invariants else {}
        response = httpx.get(f"{self.url}/get_server_info", params=params, timeout=30)
        assert response.status_code == 200, response.text
        return response.json()

    def stop(self) -> int:
        """End it with all its processes; returns its exit status."""
        return children.end(self.process, timeout_s=20)

    def remove(self) -> None:
        """End it, whatever has become of it, and remove its folder."""
        self.stop()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def samples(metrics: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The values of a text of ``/metrics``, by name and by the labels beside ``model_name``, which
    must be there."""
    values = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name")
            values[sample.name, tuple(sorted(labels.items()))] = sample.value
    return values


def run_server(model: Path | str, *flags: str, cwd: Path | None = None) -> Server:
    """Start a server, without waiting. Unless the flags say so, it drafts nothing: answers of tiny
    models repeat themselves, and would end before a test can interrupt them. Unless SHARES_ANSWERS
    is among the flags, it computes every answer: tests ask twice to see equal bits."""
    port = free_port()
    shares = SHARES_ANSWERS in flags
    flags = tuple(flag for flag in flags if flag != SHARES_ANSWERS)
    if not shares:
        flags = (*flags, "--disable-shared-answers")
    if "--speculation" not in flags:
        flags = (*flags, "--speculation", "off")
    command = [sys.executable, "-P", "-m", "radixrt.launch_server", "--model-path", str(model), "--port", str(port), *flags]  # fmt: skip
    temp_dir = Path(tempfile.mkdtemp(prefix="rx"))  # pytest's own paths are too long for sockets
    process = children.start(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temp_dir)},
        cwd=cwd,
    )
    return Server(process, f"http://127.0.0.1:{port}", temp_dir)


@contextlib.contextmanager
def serving(model: Path | str, *flags: str) -> Iterator[Server]:
    """Serve a model until the block ends."""
    server = run_server(model, *flags)
    try:
        yield server.start()
    finally:
        server.remove()
