"""Sends every body of the catalogue while another client reads a stream, and notes the stream's largest gap.

Beside the gap it notes the CPU time that the main thread of each process of the server used within it: a busy machine
makes gaps longer, but not this time. The worker goes on computing tokens while another process stalls, so its time is
about that of the gap.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.local_server import PROCESSES, local_server, server_pids
from bench.markdown import markdown
from bench.stalls.bodies import ATTACKS
from bench.stalls.sender import post, send
from radixrt.bench.output import write_json

QUIET_S = 1.0
"""Before and after each request."""


@dataclass(frozen=True)
class Event:
    """One event of the stream."""

    at: float
    """Seconds of the monotonic clock."""
    cpu_ns: tuple[int, ...]
    """CPU time of the main thread of each process of the server."""


@dataclass(frozen=True)
class Gap:
    """A pause of the stream."""

    ms: float
    cpu_ms: tuple[float, ...]
    """CPU time of each process within it."""


class Stream(threading.Thread):
    """A client that reads an endless answer token by token."""

    def __init__(self, url: str, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.events: list[Event] = []
        self._url = url
        self._files = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in pids]

    def run(self) -> None:
        body = {"prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": 7000}
        for seed in itertools.count():
            request = post(self._url, "/v1/completions", json.dumps(body | {"seed": seed}).encode())
            with urllib.request.urlopen(request) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self.events.append(Event(time.monotonic(), self._cpu_ns()))

    def _cpu_ns(self) -> tuple[int, ...]:
        return tuple(int(file.read_text().split()[0]) for file in self._files)

    def gaps(self, since: float) -> list[Gap]:
        """Between the events after this time, and up to now."""
        events = [event for event in self.events if event.at >= since]
        events.append(Event(time.monotonic(), self._cpu_ns()))
        return [
            Gap(
                1000 * (after.at - before.at),
                tuple((b - a) / 1e6 for a, b in zip(before.cpu_ns, after.cpu_ns, strict=True)),
            )
            for before, after in itertools.pairwise(events)
        ]


def measure(url: str, stream: Stream, name: str) -> dict[str, Any]:
    """Send one body; returns a row of the table."""
    begin = time.monotonic()
    time.sleep(QUIET_S)
    before = stream.gaps(begin)
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1) as sender:
        status, seconds, size = sender.apply(send, (url, name))
    time.sleep(QUIET_S)
    gaps = stream.gaps(begin)
    return {
        "request": name,
        "status": status,
        "reply_s": seconds,
        "reply_kb": size // 1000,
        "gap_before_ms": max((gap.ms for gap in before), default=0.0),
        "gap_ms": max(gap.ms for gap in gaps),
    } | {
        f"{process}_ms": max(gap.cpu_ms[index] for gap in gaps)
        for index, process in enumerate(PROCESSES)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of requests; default: all")
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    chosen = [
        name
        for name in ATTACKS
        if not arguments.names or any(part in name for part in arguments.names)
    ]
    rows = []
    with local_server(arguments.model_path, "--log-level", "error") as url:
        stream = Stream(url, list(server_pids(url).values()))
        stream.start()
        for name in chosen:
            rows.append(measure(url, stream, name))
            print(rows[-1], file=sys.stderr, flush=True)
    print(*markdown(rows), sep="\n")
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
