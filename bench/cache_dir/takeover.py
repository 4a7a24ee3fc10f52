"""The pause of streams whose worker is killed, with the KV pool in shared memory and without."""

import json
import tempfile
import threading
import time
from pathlib import Path

import httpx

from bench.cache_dir.prompts import large_model, prompt
from bench.cache_dir.returning import verdict
from bench.local_server import local_server, server_processes

ANSWER_TOKENS = 4000
"""More than any stream gets."""
PATIENCE_S = 1800.0


class _Stream:
    """An answer that is read in a thread; ``times`` are those of its parts."""

    def __init__(self, url: str, number: int, length: int, until: threading.Event) -> None:
        self.times: list[float] = []
        self._until = until
        body = {
            "input_ids": prompt(number, length),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
            "stream": True,
        }  # fmt: skip
        self.thread = threading.Thread(target=self._read, args=(url, body))
        self.thread.start()

    def _read(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and "error" not in json.loads(line[6:]):
                    self.times.append(time.perf_counter())
                if self._until.is_set():
                    return


def measure_takeover(length: int, num_streams: int) -> None:
    """Kill the worker when every stream has some tokens; the pause of a stream ends with its next
    token."""
    pauses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="radixrt-takeover-") as scratch:
        model = large_model(Path(scratch))
        for shared in ("on", "off"):
            flags = ("--load-format", "dummy", "--shared-kv-pool", shared, "--speculation", "off")
            flags += ("--max-queue-seconds", "0", "--log-level", "warning")
            with local_server(model["model"], *flags) as url:
                pauses[shared] = _pauses(url, length, num_streams)
            values = sorted(pauses[shared])
            print(f"shared pool {shared:>3}: pause {values[0]:.2f} to {values[-1]:.2f} s, mean {sum(values) / len(values):.2f} s", flush=True)  # fmt: skip
    mean = sum(pauses["on"]) / sum(pauses["off"])
    verdict("mean pause, shared pool on against off", mean, 0.3)
    verdict("longest pause", max(pauses["on"]) / max(pauses["off"]), 0.3)


def _pauses(url: str, length: int, num_streams: int) -> list[float]:
    """Seconds from the death of the worker to the next token of each stream."""
    until = threading.Event()
    streams = [_Stream(url, number, length, until) for number in range(num_streams)]
    _wait(streams, dict.fromkeys(streams, 3))
    (worker,) = server_processes(url)["worker"]
    died = time.perf_counter()
    worker.kill()
    worker.wait()
    before = {stream: len(stream.times) for stream in streams}
    _wait(streams, {stream: count + 1 for stream, count in before.items()})
    pauses = [stream.times[before[stream]] - died for stream in streams]
    until.set()
    for stream in streams:
        stream.thread.join()
    return pauses


def _wait(streams: list[_Stream], counts: dict[_Stream, int]) -> None:
    """Until each stream has so many parts."""
    deadline = time.monotonic() + PATIENCE_S
    while any(len(stream.times) < counts[stream] for stream in streams):
        if time.monotonic() > deadline or not all(one.thread.is_alive() for one in streams):
            raise RuntimeError("A stream has ended early.")
        time.sleep(0.01)
