"""Requests at 1 and 10 times the rate that the server sustains, with ``--max-queue-seconds``.

Promised: p99 of the accepted requests at 10 times the rate is at most p99 at the rate itself plus
``--max-queue-seconds``, and the memory of the processes does not grow. The rate is that of a closed
loop on the same server before.
"""

import argparse
import asyncio
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import local_server, server_processes
from bench.markdown import markdown
from bench.overload.load import Load, load_on
from radixrt.bench.client import RequestRecord
from radixrt.bench.report import summarize
from radixrt.bench.serve import closed_loop, open_loop

INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
CONCURRENCY = 32
"""Requests at a time in the closed loop that finds the rate."""
REFUSED = "HTTP 503"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-queue-seconds", type=float, nargs="+", help="default: 5 and 30; with --quick 5")  # fmt: skip
    parser.add_argument("--max-running-requests", type=int, help="of the server")
    parser.add_argument("--model-path", help="default: an untrained model of 8 layers")


def run(arguments: argparse.Namespace) -> None:
    bounds = arguments.max_queue_seconds or ([5.0] if arguments.quick else [5.0, 30.0])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--log-level", "warning"]
        if arguments.max_running_requests is not None:
            flags += ["--max-running-requests", str(arguments.max_running_requests)]
        model = arguments.model_path
        if model is None:
            model = str(write_dummy_checkpoint(Path(folder), hidden_size=512, num_layers=8))
            flags += ["--load-format", "dummy"]
        for bound in bounds:
            with local_server(model, *flags, "--max-queue-seconds", str(bound)) as url:
                rows += asyncio.run(_measure(url, bound, arguments.quick))
    print("\n".join(markdown(rows)))


async def _measure(url: str, bound: float, quick: bool) -> list[dict[str, Any]]:
    async with load_on(url) as load:
        await _send(load, 16, closed_loop(4))
        closed = await _send(load, 64 if quick else 128, closed_loop(CONCURRENCY))
        rate = summarize(closed).requests_per_s
        before = _resident_mb(url)
        seconds = 10.0 if quick else 20.0
        once = await _send(load, math.ceil(rate * seconds), open_loop(rate, 1))
        between = _resident_mb(url)
        seconds = max(seconds, 1.3 * bound)
        ten = await _send(load, math.ceil(10 * rate * seconds), open_loop(10 * rate, 2))
        after = _resident_mb(url)
    base = _p99(_accepted(once))
    return [
        _row(bound, 1, rate, once, base, before, between),
        _row(bound, 10, 10 * rate, ten, base, between, after),
    ]


async def _send(load: Load, count: int, pace: Any) -> list[RequestRecord]:
    return await load.send(count, pace, input_len=INPUT_TOKENS, output_len=OUTPUT_TOKENS)


def _row(
    bound: float,
    times: int,
    rate: float,
    records: Sequence[RequestRecord],
    base: float,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    accepted = _accepted(records)
    refused = [r for r in records if r.error and r.error.startswith(REFUSED)]
    return {
        "--max-queue-seconds": f"{bound:g}",
        "load": f"{times}x",
        "requests/s": f"{rate:.1f}",
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(records) - len(accepted) - len(refused),
        "refused after p99, s": f"{np.percentile([r.finished - r.sent for r in refused], 99):.2f}"
        if refused
        else "",
        "TTFT p99, s": f"{np.percentile([r.ttft for r in accepted], 99):.2f}",
        "answer p50, s": f"{np.median([r.e2e for r in accepted]):.2f}",
        "answer p99, s": f"{_p99(accepted):.2f}",
        "over p99 at 1x, s": f"{_p99(accepted) - base:.2f}",
        "of the bound": f"{(_p99(accepted) - base) / bound:.2f}",
        "output tokens/s": f"{summarize(records).output_tokens_per_s:.0f}",
        "MB before > after": ", ".join(
            f"{name} {before[name]:.0f} > {after[name]:.0f}" for name in before
        ),
    }


def _accepted(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if not record.error]


def _p99(records: Sequence[RequestRecord]) -> float:
    """The time to the last token, in seconds."""
    return float(np.percentile([record.e2e for record in records], 99))


def _resident_mb(url: str) -> dict[str, float]:
    """Resident memory of each process of the server, in units of 10^6 bytes."""
    return {
        name: sum(process.memory_info().rss for process in processes) / 1e6
        for name, processes in server_processes(url).items()
    }
