"""Plots hit rates over pool sizes: a panel for each trace, a line for each policy, between LRU and the bounds."""

from pathlib import Path
from typing import Any

from radixrt.bench.cache.result import CacheResult
from radixrt.bench.plot import FAINT, INK, STYLE, plt

COLORS = ("#4a7fc1", "#27ab83", "#f0b429", "#d64545", "#8662c7", "#12939a")


def plot_results(results: list[CacheResult], path: Path) -> None:
    """Draw into a file; its suffix says the format."""
    traces = list(dict.fromkeys(result.trace for result in results))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(traces), figsize=(4.6 * len(traces), 4.2), layout="constrained", squeeze=False
        )
        for axes, trace in zip(panels[0], traces, strict=True):
            _panel(axes, trace, [result for result in results if result.trace == trace])
        figure.savefig(path, dpi=144)
        plt.close(figure)


def _panel(axes: Any, trace: str, results: list[CacheResult]) -> None:
    axes.set_title(trace)
    axes.set_xlabel("KV pool, million tokens")
    axes.set_ylabel("prompt tokens from the cache, %")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    several = len({result.schedule_policy for result in results}) > 1
    lines = list(dict.fromkeys(map(_line, results)))
    for number, (schedule, eviction, hints) in enumerate(lines):
        rows = [row for row in results if _line(row) == (schedule, eviction, hints)]
        rows.sort(key=lambda row: row.pool_tokens)
        label = eviction if hints == "none" else f"{eviction}, hints: {hints}"
        label = f"{label}, {schedule}" if several else label
        pools = [row.pool_tokens / 2**20 for row in rows]
        color = COLORS[number % len(COLORS)]
        axes.plot(pools, [row.hit_percent for row in rows], "o-", color=color, label=label)
        if (eviction, hints) == ("lru", "none") or not any(other[1] == "lru" for other in lines):
            belady = [row.belady_percent for row in rows]
            axes.plot(pools, belady, "--", color=INK, linewidth=1, label=f"Belady ({schedule})")
    axes.axhline(results[0].infinite_percent, color=FAINT, linewidth=1, label="infinite cache")
    axes.set_ylim(0, 1.05 * results[0].infinite_percent)
    axes.legend(fontsize=8)


def _line(result: CacheResult) -> tuple[str, str, str]:
    return result.schedule_policy, result.eviction_policy, result.hints
