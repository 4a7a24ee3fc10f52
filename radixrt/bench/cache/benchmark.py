"""``radixrt bench cache``: replay traces, compare policies, print, save and draw."""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby, product
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import track
from rich.table import Table

from radixrt.bench.arguments import HintLevel, RouterName
from radixrt.bench.cache.engine import DiskModel, ServiceModel
from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.result import CacheResult, evaluate, gap_closed
from radixrt.bench.cache.trace import Trace, read_trace
from radixrt.bench.report import console_beside, write_json

TABLE_WIDTH = 110
"""Characters, in files and pipes."""
_COLUMNS = (
    "hit %",
    "FLOPs",
    "Belady",
    "gap %",
    "TTFT s",
    "p50",
    "p99",
    "retr.",
    "evicted",
    "disk %",
    "written",
)
_ROUTED = ("hit %", "of one", "TTFT s", "p50", "p99", "to best", "p99 to best", "busiest", "retr.")


def run(arguments: argparse.Namespace) -> int:
    """Replay and report; see :func:`radixrt.bench.arguments.add_cache_arguments`."""
    console = console_beside(arguments.json)
    if not console.is_terminal:
        console.width = max(console.width, TABLE_WIDTH)
    traces = [
        read_trace(Path(path), limit=arguments.requests, speed=arguments.speed)
        for path in arguments.trace
    ]
    setups = list(_setups(arguments))
    cells = list(product(traces, setups))
    results = _with_gaps(
        [
            _replay_cell(trace, setup)
            for trace, setup in track(cells, "Replaying", console=console, transient=True)
        ]
    )
    for trace in traces:
        rows = [row for row in results if row.trace == trace.name and row.replicas == 1]
        if rows:
            console.print(_table(trace, rows))
    for table in _routing_tables(results):
        console.print(table)
    _print_rate(console, traces, results, len(setups))
    write_json(arguments.json, [asdict(result) for result in results])
    if arguments.plot:
        from radixrt.bench.plot import plot_results

        plot_results(results, Path(arguments.plot))
    return 0


def _setups(arguments: argparse.Namespace) -> Iterator[Setup]:
    service = ServiceModel(
        arguments.prefill_rate, arguments.decode_ms / 1e3, arguments.tokens_per_symbol
    )
    disk = DiskModel(arguments.disk_tokens, arguments.disk_rate, arguments.disk_min_chance)
    choices = product(
        arguments.tokens, arguments.schedule_policy, arguments.policy, _hint_choices(arguments)
    )
    fleets = _fleets(arguments)
    for (pool_tokens, schedule_policy, eviction_policy, (hints, error)), fleet in product(
        choices, fleets
    ):
        yield Setup(
            pool_tokens,
            eviction_policy,
            schedule_policy,
            arguments.page_size,
            hints,
            error,
            arguments.closed_loop,
            arguments.max_running,
            service,
            fleet[0],
            fleet[1],
            disk,
        )


def _fleets(arguments: argparse.Namespace) -> list[tuple[int, RouterName]]:
    """Numbers of replicas, each with the rules; one engine needs no rule."""
    rules = {n: arguments.router if n > 1 else arguments.router[:1] for n in arguments.replicas}
    return [(number, rule) for number in rules for rule in rules[number]]


def _hint_choices(arguments: argparse.Namespace) -> Iterator[tuple[HintLevel, float]]:
    for level in arguments.hints:
        errors = arguments.hint_error if level == "program" else arguments.hint_error[:1]
        yield from ((level, error) for error in errors)


def _replay_cell(trace: Trace, setup: Setup) -> CacheResult:
    begin = time.process_time()
    replayed = replay(trace, setup)
    return evaluate(trace, replayed, time.process_time() - begin)


def _with_gaps(results: list[CacheResult]) -> list[CacheResult]:
    lru = {
        _cell(result): result
        for result in results
        if result.eviction_policy == "lru" and result.hints == "none" and result.replicas == 1
    }
    return [
        replace(result, lru_gap_closed_percent=gap_closed(result, lru[_cell(result)]))
        if _cell(result) in lru
        else result
        for result in results
    ]


def _cell(result: CacheResult) -> tuple[str, int, str]:
    """The settings that are equal where two eviction policies are compared."""
    return result.trace, result.pool_tokens, result.schedule_policy


def _table(trace: Trace, results: list[CacheResult]) -> Table:
    title = (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens / 1e6:,.1f} M prompt tokens, "
        f"{results[0].infinite_percent:.1f} % hits in an infinite cache"
    )
    table = _empty(title, ("pool", "queue", "eviction", "hints"), _COLUMNS)
    for result in results:
        table.add_row(*_row(result))
    return table


def _empty(title: str, names: tuple[str, ...], columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(result: CacheResult) -> list[str]:
    gap = result.lru_gap_closed_percent
    ttft = result.ttft_ms
    times = ("-", "-", "-") if ttft is None else map(_seconds, (ttft.mean, ttft.p50, ttft.p99))
    return [
        f"{result.pool_tokens / 2**20:g}M",
        result.schedule_policy,
        result.eviction_policy,
        result.hints,
        f"{result.hit_percent:.2f}",
        f"{result.flops_hit_percent:.2f}",
        f"{result.belady_percent:.2f}",
        "-" if gap is None else f"{gap:+.1f}",
        *times,
        f"{result.retractions:,}",
        f"{result.evicted_tokens / 2**20:,.0f}M",
        f"{result.disk_percent:.2f}",
        f"{result.written_tokens / 2**20:,.1f}M",
    ]


def _seconds(milliseconds: float) -> str:
    seconds = milliseconds / 1e3
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _routing_tables(results: list[CacheResult]) -> list[Table]:
    """A table for each trace, and one of the means over all cells; none if no result has several
    replicas."""
    routed = [result for result in results if result.replicas > 1]
    tables = []
    for trace, rows in groupby(routed, lambda result: result.trace):
        table = _empty(
            f"{trace}, several replicas", ("pool", "queue", "replicas", "router"), _ROUTED
        )
        for row in rows:
            pool = f"{row.pool_tokens / 2**20:g}M"
            name = (pool, row.schedule_policy, str(row.replicas), row.router)
            table.add_row(*name, *_numbers([row], results))
        tables.append(table)
    if routed:
        table = _empty("Mean of all cells", ("router",), _ROUTED)
        for router in dict.fromkeys(row.router for row in routed):
            own = [row for row in routed if row.router == router]
            table.add_row(router, *_numbers(own, results))
        tables.append(table)
    return tables


def _numbers(rows: list[CacheResult], results: list[CacheResult]) -> list[str]:
    """The mean of each column over some rows."""
    cells: dict[object, list[CacheResult]] = defaultdict(list)
    for result in results:
        cells[_routed_cell(result), result.replicas].append(result)
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        columns["hit %"].append(row.hit_percent)
        columns["busiest"].append(row.busiest)
        columns["retr."].append(row.retractions)
        for one in cells.get((_routed_cell(row), 1), ()):
            columns["of one"].append(row.hit_percent / one.hit_percent)
        if row.ttft_ms is not None:
            columns["TTFT s"].append(row.ttft_ms.mean / 1e3)
            columns["p50"].append(row.ttft_ms.p50 / 1e3)
            columns["p99"].append(row.ttft_ms.p99 / 1e3)
            timed = [
                other.ttft_ms for other in cells[_routed_cell(row), row.replicas] if other.ttft_ms
            ]
            columns["to best"].append(row.ttft_ms.mean / min(other.mean for other in timed))
            columns["p99 to best"].append(row.ttft_ms.p99 / min(other.p99 for other in timed))
    return [f"{mean(columns[name]):.3g}" if columns[name] else "-" for name in _ROUTED]


def _routed_cell(result: CacheResult) -> tuple[object, ...]:
    """The settings that are equal where two routing rules are compared."""
    return *_cell(result), result.eviction_policy, result.hints


def _print_rate(
    console: Console, traces: list[Trace], results: list[CacheResult], num_setups: int
) -> None:
    num_requests = num_setups * sum(len(trace.requests) for trace in traces)
    seconds = sum(result.replay_s for result in results)
    console.print(
        f"{num_requests:,} requests replayed in {seconds:.1f} s of CPU time: {60 * num_requests / seconds:,.0f} a minute.",
        highlight=False,
    )
