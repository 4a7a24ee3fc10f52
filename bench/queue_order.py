"""Compares orders of the waiting queue on recorded traffic: ``python -m bench.queue_order TRACE ...``.

Replays every trace at several speeds and pool sizes, as ``radixrt bench cache`` does, under each order. A case is *overloaded*
if first come first served needs a tenth more time than the recording took: its queue grows while requests
come. All orders are compared with first come first served, case by case.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.service import ServiceModel
from radixrt.bench.cache.trace import Trace, read_trace
from radixrt.scheduler.queue.queue_order import ORDERS, QueueOrder

BASELINE = "fcfs"
OVERLOAD = 1.1
"""Duration of the replay by that of the recording, from which on a case counts as overloaded."""


@dataclass(frozen=True)
class Outcome:
    """One order in one case; times in seconds."""

    trace: str
    pool_mi: float
    """Pool in 2^20 tokens."""
    speed: float
    order: str
    hit_percent: float
    ttft_mean: float
    ttft_p99: float
    ttft_max: float
    stretch: float
    """Duration of the replay by that of the recording."""
    requests_per_minute: float
    """Replayed on one core."""


@dataclass(frozen=True)
class Gain:
    """One order against first come first served, over a set of cases."""

    order: str
    cases: int
    hit_points: float
    """Mean difference in percent of the prompt tokens."""
    least_hit_points: float
    ttft_mean: float
    """Mean ratio, as all that follow."""
    ttft_p99: float
    worst_ttft_p99: float
    ttft_max: float
    worst_ttft_max: float


def main() -> None:
    arguments = _parse()
    for name in arguments.orders:
        if name not in ORDERS:
            ORDERS[name] = _parse_order(name)  # type: ignore[index]
    outcomes = []
    for path, speed in product(arguments.trace, arguments.speeds):
        trace = read_trace(path, speed=speed, limit=arguments.requests)
        for pool, order in product(arguments.pools, (BASELINE, *arguments.orders)):
            outcomes.append(measure(trace, speed, pool, order, arguments.prefill_rate))
            if order != BASELINE:
                print(_sentence(outcomes), flush=True)
    overloaded = overloaded_cases(outcomes)
    print(f"\n{len(overloaded)} of {len(_cases(outcomes))} cases are overloaded.\n")
    gains = list(compare(outcomes, overloaded))
    print("\n".join(_markdown(gains)))
    if arguments.json:
        report = {"outcomes": list(map(asdict, outcomes)), "gains": list(map(asdict, gains))}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.queue_order", description=__doc__)
    add = parser.add_argument
    add("trace", nargs="+", type=Path, help="as for radixrt bench cache")
    add("--orders", nargs="+", default=["lpm", "suf"], help="names, or NAME:N for every Nth pick the oldest (0: never)")  # fmt: skip
    add("--pools", nargs="+", type=float, default=[0.5, 1, 2, 4, 8], help="million tokens")
    add("--speeds", nargs="+", type=float, default=[1, 2, 4], help="times as fast as recorded")
    add("--prefill-rate", type=float, default=100_000, help="tokens a second")
    add("--requests", type=int, help="of each trace only the first so many")
    add("--json", type=Path, help="write all numbers to this file too")
    return parser.parse_args()


def _parse_order(name: str) -> QueueOrder:
    """``lpm:8``: the order ``lpm`` with every eighth pick the oldest."""
    base, _, every = name.partition(":")
    return replace(ORDERS[base], oldest_every=int(every) or 2**62)  # type: ignore[index]


def measure(trace: Trace, speed: float, pool: float, order: str, prefill_rate: float) -> Outcome:
    """Replay one case under one order."""
    begin = time.process_time()
    setup = Setup(int(pool * 2**20), "lru", order, service=ServiceModel(prefill_rate))
    run = replay(trace, setup)
    cpu_s = time.process_time() - begin
    ttft = np.array([seconds for seconds in run.ttft_s if seconds is not None])
    return Outcome(
        trace=trace.name,
        pool_mi=pool,
        speed=speed,
        order=order,
        hit_percent=100 * sum(run.cached_tokens) / trace.prompt_tokens,
        ttft_mean=float(ttft.mean()),
        ttft_p99=float(np.percentile(ttft, 99)),
        ttft_max=float(ttft.max()),
        stretch=run.duration_s / trace.requests[-1].arrival_s,
        requests_per_minute=60 * len(trace.requests) / cpu_s,
    )


Case = tuple[str, float, float]


def _case(outcome: Outcome) -> Case:
    return outcome.trace, outcome.speed, outcome.pool_mi


def _cases(outcomes: list[Outcome]) -> dict[Case, Outcome]:
    """The baseline of every case."""
    return {_case(outcome): outcome for outcome in outcomes if outcome.order == BASELINE}


def overloaded_cases(outcomes: list[Outcome]) -> list[Case]:
    """Cases in which the baseline's queue grows."""
    return [case for case, base in _cases(outcomes).items() if base.stretch >= OVERLOAD]


def compare(outcomes: list[Outcome], cases: list[Case]) -> Iterator[Gain]:
    """Each order against the baseline in these cases."""
    baseline = _cases(outcomes)
    for order in dict.fromkeys(outcome.order for outcome in outcomes if outcome.order != BASELINE):
        pairs = [
            (outcome, baseline[_case(outcome)])
            for outcome in outcomes
            if outcome.order == order and _case(outcome) in cases
        ]
        if pairs:
            yield _gain(order, pairs)


def _gain(order: str, pairs: list[tuple[Outcome, Outcome]]) -> Gain:
    points = [ours.hit_percent - base.hit_percent for ours, base in pairs]
    mean = [ours.ttft_mean / base.ttft_mean for ours, base in pairs]
    p99 = [ours.ttft_p99 / base.ttft_p99 for ours, base in pairs]
    longest = [ours.ttft_max / base.ttft_max for ours, base in pairs]
    return Gain(
        order=order,
        cases=len(pairs),
        hit_points=float(np.mean(points)),
        least_hit_points=min(points),
        ttft_mean=float(np.mean(mean)),
        ttft_p99=float(np.mean(p99)),
        worst_ttft_p99=max(p99),
        ttft_max=float(np.mean(longest)),
        worst_ttft_max=max(longest),
    )


def _sentence(outcomes: list[Outcome]) -> str:
    ours = outcomes[-1]
    base = _cases(outcomes)[_case(ours)]
    return (
        f"{ours.trace:20} {ours.speed:g}x {ours.pool_mi:4g}M  {BASELINE} {base.hit_percent:5.1f} % "
        f"p99 {base.ttft_p99:6.1f} s, {base.stretch:4.2f} of the time | {ours.order:6} {ours.hit_percent:5.1f} % "
        f"p99 {ours.ttft_p99:6.1f} s | {ours.hit_percent - base.hit_percent:+5.1f} points, mean TTFT "
        f"x{ours.ttft_mean / base.ttft_mean:.2f}, p99 x{ours.ttft_p99 / base.ttft_p99:.2f}; "
        f"{ours.requests_per_minute:,.0f} requests a minute"
    )


def _markdown(gains: list[Gain]) -> list[str]:
    lines = [
        "| order | hit points (least) | mean TTFT | p99 TTFT (worst) | longest wait (worst) |",
        "|---|---|---|---|---|",
    ]
    for gain in gains:
        lines.append(
            f"| `{gain.order}` | {gain.hit_points:+.1f} ({gain.least_hit_points:+.1f}) | x{gain.ttft_mean:.2f} "
            f"| x{gain.ttft_p99:.2f} ({gain.worst_ttft_p99:.2f}) | x{gain.ttft_max:.2f} ({gain.worst_ttft_max:.2f}) |"
        )
    return lines


if __name__ == "__main__":
    main()
