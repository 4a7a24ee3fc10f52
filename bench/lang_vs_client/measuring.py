"""Measures one run of a program: tokens and time, on a server with an empty cache."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import children

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cost:
    """Costs of one run."""

    prefill_tokens: int
    """Prompt tokens computed: those not found in the cache."""
    prompt_tokens: int
    evicted_tokens: int
    retractions: int
    seconds: float
    """Wall-clock time of the program."""
    cpu_seconds: float
    """CPU time of the program's process and the server's together. Other work on the machine affects it less."""
    held_tokens: int
    """In the cache at the end. Where nothing was evicted: the program's working set."""
    last_line: str


class Player:
    """A process that runs one program on request."""

    def __init__(self, program: str, url: str) -> None:
        self.program = program
        self._url = url
        self._process = children.start(
            [sys.executable, "-m", "bench.lang_vs_client.player", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "RADIXRT_URL": url},
        )

    def play(self) -> Cost:
        """Raises:
        RuntimeError: the program failed; it has said why on stderr.
        """
        _call(self._url, "/flush_cache", post=True)
        before, cpu_before = _call(self._url, "/v1/cache/stats"), _cpu_seconds()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.program} ended with an error.")
        answer = json.loads(line)
        after, cpu_after = _call(self._url, "/v1/cache/stats"), _cpu_seconds()
        grown = {
            name: after[name] - before[name]
            for name in ("prompt_tokens", "cached_tokens", "evicted_tokens", "retractions")
        }
        return Cost(
            prefill_tokens=grown["prompt_tokens"] - grown.pop("cached_tokens"),
            **grown,
            seconds=answer["seconds"],
            cpu_seconds=cpu_after - cpu_before,
            held_tokens=after["tokens"]["cached"],
            last_line=answer["last_line"],
        )

    def stop(self) -> None:
        children.end(self._process)


@contextlib.contextmanager
def player(program: str, url: str) -> Iterator[Player]:
    playing = Player(program, url)
    try:
        yield playing
    finally:
        playing.stop()


def _call(url: str, path: str, post: bool = False) -> Any:
    request = urllib.request.Request(url + path, method="POST" if post else "GET")
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def _cpu_seconds() -> float:
    """Of all processes that this one has started: the server's and the players'."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
