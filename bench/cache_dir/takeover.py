"""The pause of streams whose worker is killed, with the KV pool in shared memory and without."""

import json
import tempfile
import threading
import time
from pathlib import Path

import httpx

from bench.cache_dir.prompts import NEW_PROMPTS, large_model, prompt
from bench.cache_dir.returning import verdict
from bench.local_server import local_server, server_processes
from bench.padded_demo import make_padded_demo

ANSWER_TOKENS = 4000
"""More than any stream gets."""
OWN_TOKENS = 64
"""Tokens of a prompt that no other has."""
TOKENS_BEFORE = 32
"""Tokens of each answer before the death, at least."""
PATIENCE_S = 1800.0


class _Stream:
    """An answer that is read in a thread; ``times`` are those of its parts."""

    def __init__(self, url: str, token_ids: list[int], until: threading.Event) -> None:
        self.times: list[float] = []
        self._until = until
        body = {
            "input_ids": token_ids,
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


def measure_takeover(length: int, num_streams: int, padded: Path | None = None) -> None:
    """Kill the worker when every stream has some tokens; the pause of a stream ends with its next
    token.

    Args:
        length: tokens of a prompt. All but the last ones are a document that all prompts share, so
            a server computes it once, before the death and where the pool is lost after it.
        padded: the folder of a model of :mod:`bench.padded_demo`; None: dummy weights, which a
            worker makes again whenever it starts.
    """
    pauses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="radixrt-takeover-") as scratch:
        model, flags = _model(padded, Path(scratch))
        for shared in ("on", "off"):
            begin = time.perf_counter()
            with local_server(model, *flags, "--shared-kv-pool", shared) as url:
                pauses[shared], again = _pauses(url, length, num_streams)
            values = sorted(pauses[shared])
            print(
                f"shared pool {shared:>3}: pause {values[0]:.2f} to {values[-1]:.2f} s, mean {sum(values) / len(values):.2f} s; "
                f"{again} tokens computed again; {time.perf_counter() - begin:.0f} s in all",
                flush=True,
            )
    mean = sum(pauses["on"]) / sum(pauses["off"])
    verdict("mean pause, shared pool on against off", mean, 0.3)
    verdict("longest pause", max(pauses["on"]) / max(pauses["off"]), 0.3)


def _model(padded: Path | None, scratch: Path) -> tuple[str, list[str]]:
    """The model, and the flags of its server."""
    flags = ["--speculation", "off", "--max-queue-seconds", "0", "--log-level", "warning"]
    if padded is not None:
        return str(make_padded_demo(padded)), flags
    return large_model(scratch)["model"], ["--load-format", "dummy", *flags]


def _pauses(url: str, length: int, num_streams: int) -> tuple[list[float], int]:
    """Seconds from the death of the worker to the next token of each stream; and the tokens that
    the next worker has computed again by then."""
    until = threading.Event()
    document = prompt(NEW_PROMPTS, max(0, length - OWN_TOKENS))
    streams = [
        _Stream(url, [*document, *prompt(number, min(length, OWN_TOKENS))], until)
        for number in range(num_streams)
    ]
    _wait(streams, dict.fromkeys(streams, TOKENS_BEFORE))
    (worker,) = server_processes(url)["worker"]
    died = time.perf_counter()
    worker.kill()
    worker.wait()
    before = {stream: len(stream.times) for stream in streams}
    _wait(streams, {stream: count + 1 for stream, count in before.items()})
    pauses = [stream.times[before[stream]] - died for stream in streams]
    counters = httpx.get(f"{url}/v1/cache/stats", timeout=PATIENCE_S).json()
    until.set()
    for stream in streams:
        stream.thread.join()
    return pauses, counters["prompt_tokens"] - counters["cached_tokens"]


def _wait(streams: list[_Stream], counts: dict[_Stream, int]) -> None:
    """Until each stream has so many parts."""
    deadline = time.monotonic() + PATIENCE_S
    while any(len(stream.times) < counts[stream] for stream in streams):
        if time.monotonic() > deadline or not all(one.thread.is_alive() for one in streams):
            raise RuntimeError("A stream has ended early.")
        time.sleep(0.01)
