"""First tokens of short prompts, and the running answers, beside long prompts.

The default of ``--max-step-ms`` and 0, no bound, take turns on two servers. Promised: the first
token of short prompts beside prompts of 7,000 tokens takes at most 3 times as long as alone (p99),
and answers of a 387 M model beside prefill have at most 200 ms between two tokens (p99) at 0.95 of
the throughput without a bound.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import local_server
from bench.markdown import markdown, mean_and_interval, median_and_range
from bench.overload.load import Load, load_on, require_all
from radixrt.bench.report import summarize
from radixrt.bench.serve import closed_loop, open_loop

UNBOUNDED = "--max-step-ms 0"

SHORT_TOKENS, LONG_TOKENS = 64, 7000
LONG_PROMPTS = 2
"""Long prompts at a time."""
SHORT_RATE = 5.0
"""Short prompts per second."""
WARM_UP = 24

CONCURRENCY = 16

Sides = dict[str, list[str]]
"""Flags of each server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement, by turns")
    parser.add_argument("--only", choices=("ttft", "itl"), help="one of the two tables")
    parser.add_argument("--also", type=float, nargs="+", default=[], metavar="MS", help="further values of --max-step-ms")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    rounds = 1 if arguments.quick else arguments.rounds
    sides: dict[str, list[str]] = {"default": []}
    for value in [0.0, *arguments.also]:
        sides[f"--max-step-ms {value:g}"] = ["--max-step-ms", str(value)]
    if arguments.only != "itl":
        rows = asyncio.run(_first_tokens(sides, rounds, 20 if arguments.quick else 40))
        print("\n".join(markdown(rows)), "\n")
    if arguments.only != "ttft":
        rows = asyncio.run(_running_answers(sides, rounds, 12 if arguments.quick else 24))
        print("\n".join(markdown(rows)))


async def _first_tokens(sides: Sides, rounds: int, count: int) -> list[dict[str, Any]]:
    """Short prompts alone, and beside long ones."""
    seconds: dict[tuple[str, str], list[float]] = {}
    longs: dict[tuple[str, str], list[float]] = {}
    async with _servers(sides, small=True) as loads:
        for number in range(rounds):
            for side, load in loads.items():
                alone = await _short_prompts(load, count, number)
                seconds.setdefault((side, "alone"), []).extend(alone)
                long = load.always(LONG_PROMPTS, input_len=LONG_TOKENS, output_len=4)
                async with long as long_records:
                    beside = await _short_prompts(load, count, number)
                seconds.setdefault((side, "beside 7,000 tokens"), []).extend(beside)
                ended = [record.ttft for record in require_all(long_records)]
                longs.setdefault((side, "beside 7,000 tokens"), []).extend(ended)
    rows = []
    for (side, state), seen in seconds.items():
        p50, p99 = _percentiles_ms(seen)
        base_p50, base_p99 = _percentiles_ms(seconds[side, "alone"])
        rows.append(
            {
                "server": side,
                "short prompts": state,
                "requests": len(seen),
                "TTFT p50, ms": f"{p50:.1f}",
                "p99": f"{p99:.1f}",
                "ratio of p50 to alone": f"{p50 / base_p50:.2f}",
                "of p99": f"{p99 / base_p99:.2f}",
                "long prompts": len(longs.get((side, state), [])),
                "their TTFT p50, ms": f"{_percentiles_ms(longs[side, state])[0]:.0f}"
                if longs.get((side, state))
                else "",
            }
        )
    return rows


async def _short_prompts(load: Load, count: int, seed: int) -> list[float]:
    pace = open_loop(SHORT_RATE, seed)
    records = await load.send(count, pace, input_len=SHORT_TOKENS, output_len=4)
    return [record.ttft for record in require_all(records)]


async def _running_answers(sides: Sides, rounds: int, count: int) -> list[dict[str, Any]]:
    """Prompts of shared documents arrive beside running answers."""
    gaps: dict[str, list[float]] = {side: [] for side in sides}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    async with _servers(sides) as loads:
        for number in range(rounds):
            turns = list(loads.items())
            for side, load in turns if number % 2 == 0 else reversed(turns):
                await load.flush_cache()
                lengths = {"input_len": 32, "output_len": 32, "groups": 4, "prefix_len": 512}
                records = require_all(await load.send(count, closed_loop(CONCURRENCY), **lengths))
                gaps[side] += [gap for record in records for gap in record.inter_token_latencies]
                speeds[side].append(summarize(records).output_tokens_per_s)
    return [
        {
            "server": side,
            "ITL p50, ms": f"{_percentiles_ms(gaps[side])[0]:.1f}",
            "ITL p99, ms": f"{_percentiles_ms(gaps[side])[1]:.1f}",
            "output tokens/s": median_and_range(speeds[side]),
            f"ratio to {UNBOUNDED}, by pairs": mean_and_interval(
                [a / b for a, b in zip(speeds[side], speeds[UNBOUNDED], strict=True)]
            ),
        }
        for side in sides
    ]


@contextlib.asynccontextmanager
async def _servers(sides: Sides, small: bool = False) -> AsyncIterator[dict[str, Load]]:
    """A server of each side with the same untrained model, warm."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shape: dict[str, Any] = {"hidden_size": 256, "num_layers": 4} if small else {}
        write_dummy_checkpoint(Path(folder), **shape)
        loads = {}
        for side, flags in sides.items():
            untrained = ("--load-format", "dummy", "--log-level", "warning")
            url = stack.enter_context(local_server(folder, *untrained, *flags))
            loads[side] = await stack.enter_async_context(load_on(url))
        for load in loads.values():
            await load.send(WARM_UP, closed_loop(4), input_len=128, output_len=8)
            await load.send(1, closed_loop(1), input_len=2048, output_len=4)
        yield loads


def _percentiles_ms(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(1e3 * np.asarray(seconds), (50, 99)).tolist()
    return p50, p99
