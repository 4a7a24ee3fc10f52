"""Chooses the prices of the router on some traces and measures them on another: ``python -m bench.routing_prices TRACE TRACE TRACE``.

Each trace is replayed with 2 and with 8 replicas under each setting of the prices, as docs/routing.md does. For each trace in turn, the setting is chosen
on the other traces: of those that keep the share of one engine's hits that is asked for, the one with the least sum of mean and 99th percentile of TTFT,
each as a multiple of the least of all settings. The printed rows are the held-out trace under that setting.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np

from bench.markdown import markdown
from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.service import ServiceModel
from radixrt.bench.cache.trace import Trace, read_trace
from radixrt.router import router

POOL_TOKENS, PREFILL_RATE = 4 << 20, 100_000
"""Of each replica."""

LEAST_HITS = {2: 0.95, 8: 0.90}
"""Share of one engine's hits, by the number of replicas; the traffic is as many times as fast as recorded."""

GRID: dict[str, tuple[float, ...]] = {
    "EVICTION_WEIGHT": (0.0, 1.5, 3.0),
    "KV_PRICE_S": (1.0, 2.0, 4.0),
}
"""Values of the constants of :mod:`radixrt.router.router`."""

Setting = tuple[float, ...]


@dataclass(frozen=True)
class Cell:
    """One trace on a number of replicas, under one setting; an empty setting is one engine with the whole pool."""

    trace: str
    replicas: int
    setting: Setting
    hit_percent: float
    ttft_mean: float
    ttft_p99: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument(
        "--json", type=Path, help="keep the cells here, and measure those that are missing"
    )
    arguments = parser.parse_args()
    file: Path | None = arguments.json
    cells: list[Cell] = []
    if file is not None and file.exists():
        rows = json.loads(file.read_text())
        cells = [Cell(**{**row, "setting": tuple(row["setting"])}) for row in rows]
    for trace, replicas, setting in _missing(arguments.traces, cells):
        cells.append(_cell(trace, replicas, setting))
        if file is not None:
            file.write_text(json.dumps([vars(cell) for cell in cells]))
    print("\n".join(markdown(list(_held_out(cells)))))


def _missing(paths: list[Path], cells: list[Cell]) -> Iterator[tuple[Trace, int, Setting]]:
    known = {(cell.trace, cell.replicas, cell.setting) for cell in cells}
    for path, replicas in product(paths, LEAST_HITS):
        trace = read_trace(path, speed=replicas)
        for setting in ((), *product(*GRID.values())):
            if (trace.name, replicas, setting) not in known:
                yield trace, replicas, setting


def _cell(trace: Trace, replicas: int, setting: Setting) -> Cell:
    for name, value in zip(GRID, setting, strict=False):  # one engine has no setting
        setattr(router, name, value)
    run = replay(
        trace,
        Setup(
            POOL_TOKENS * replicas,
            schedule_policy="lpm",
            service=ServiceModel(PREFILL_RATE * replicas),
            replicas=replicas if setting else 1,
        ),
    )
    ttft = [seconds for seconds in run.ttft_s if seconds is not None]
    total = sum(trace.requests[number].input_tokens for number in run.order)
    cell = Cell(
        trace=trace.name,
        replicas=replicas,
        setting=setting,
        hit_percent=100 * sum(run.cached_tokens) / total,
        ttft_mean=float(np.mean(ttft)),
        ttft_p99=float(np.percentile(ttft, 99)),
    )
    print(vars(cell), flush=True)
    return cell


def _held_out(cells: list[Cell]) -> Iterator[dict[str, str]]:
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    by_key = {(cell.trace, cell.replicas, cell.setting): cell for cell in cells}
    for held_out in traces:
        chosen = _choose([cell for cell in cells if cell.trace != held_out])
        for replicas in LEAST_HITS:
            cell, one = by_key[held_out, replicas, chosen], by_key[held_out, replicas, ()]
            yield {
                "held out": held_out,
                "replicas": str(replicas),
                **{name: f"{value:g}" for name, value in zip(GRID, chosen, strict=True)},
                "hit %": f"{cell.hit_percent:.1f}",
                "of one": f"{cell.hit_percent / one.hit_percent:.3f}",
                "TTFT mean s": f"{cell.ttft_mean:.3f}",
                "p99 s": f"{cell.ttft_p99:.2f}",
            }


def _choose(cells: list[Cell]) -> Setting:
    """The best setting for some traces."""
    one = {(cell.trace, cell.replicas): cell for cell in cells if not cell.setting}
    least: dict[tuple[str, int], tuple[float, float]] = {}
    for cell in cells:
        if cell.setting:
            m, p = least.get((cell.trace, cell.replicas), (np.inf, np.inf))
            least[cell.trace, cell.replicas] = min(m, cell.ttft_mean), min(p, cell.ttft_p99)
    costs = {}
    for setting in dict.fromkeys(cell.setting for cell in cells if cell.setting):
        own = [cell for cell in cells if cell.setting == setting]
        keeps = all(
            cell.hit_percent
            >= LEAST_HITS[cell.replicas] * one[cell.trace, cell.replicas].hit_percent
            for cell in own
        )
        ratios = [
            cell.ttft_mean / least[cell.trace, cell.replicas][0]
            + cell.ttft_p99 / least[cell.trace, cell.replicas][1]
            for cell in own
        ]
        costs[setting] = (not keeps, mean(ratios))
    return min(costs, key=costs.__getitem__)


if __name__ == "__main__":
    main()
