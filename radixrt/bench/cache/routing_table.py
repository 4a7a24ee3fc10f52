"""Tables of replays with several replicas: each routing rule beside the others, and beside one
engine with the whole pool."""

from collections import defaultdict
from itertools import groupby
from statistics import mean

from rich.table import Table

from radixrt.bench.cache.result import CacheResult

_COLUMNS = ("hit %", "of one", "TTFT s", "p50", "p99", "to best", "p99 to best", "busiest", "retr.")


def routing_tables(results: list[CacheResult]) -> list[Table]:
    """A table for each trace, and one of the means over all cells; none if no result has several
    replicas."""
    routed = [result for result in results if result.replicas > 1]
    tables = []
    for trace, rows in groupby(routed, lambda result: result.trace):
        table = _empty(f"{trace}, several replicas", ("pool", "queue", "replicas", "router"))
        for row in rows:
            name = (
                f"{row.pool_tokens / 2**20:g}M",
                row.schedule_policy,
                str(row.replicas),
                row.router,
            )
            table.add_row(*name, *_numbers([row], results))
        tables.append(table)
    if routed:
        table = _empty("Mean of all cells", ("router",))
        for router in dict.fromkeys(row.router for row in routed):
            own = [row for row in routed if row.router == router]
            table.add_row(router, *_numbers(own, results))
        tables.append(table)
    return tables


def _empty(title: str, names: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _numbers(rows: list[CacheResult], results: list[CacheResult]) -> list[str]:
    """The mean of each column over some rows."""
    cells: dict[object, list[CacheResult]] = defaultdict(list)
    for result in results:
        cells[_cell(result), result.replicas].append(result)
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        columns["hit %"].append(row.hit_percent)
        columns["busiest"].append(row.busiest)
        columns["retr."].append(row.retractions)
        for one in cells.get((_cell(row), 1), ()):
            columns["of one"].append(row.hit_percent / one.hit_percent)
        if row.ttft_ms is not None:
            columns["TTFT s"].append(row.ttft_ms.mean / 1e3)
            columns["p50"].append(row.ttft_ms.p50 / 1e3)
            columns["p99"].append(row.ttft_ms.p99 / 1e3)
            timed = [other.ttft_ms for other in cells[_cell(row), row.replicas] if other.ttft_ms]
            columns["to best"].append(row.ttft_ms.mean / min(other.mean for other in timed))
            columns["p99 to best"].append(row.ttft_ms.p99 / min(other.p99 for other in timed))
    return [f"{mean(columns[name]):.3g}" if columns[name] else "-" for name in _COLUMNS]


def _cell(result: CacheResult) -> tuple[str, int, str, str, str]:
    """The settings that are equal where two routing rules are compared."""
    return (
        result.trace,
        result.pool_tokens,
        result.schedule_policy,
        result.eviction_policy,
        result.hints,
    )
