"""Plots hit rates over pool sizes: a panel for each trace, a line for each policy, between LRU and
the bounds.

With several replicas, a panel for each trace and number of replicas has TTFT and hit rate of each
routing rule.
"""

from pathlib import Path
from typing import Any

from radixrt.bench.cache.result import CacheResult
from radixrt.bench.plot import FAINT, INK, STYLE, plt

COLORS = ("#4a7fc1", "#27ab83", "#f0b429", "#d64545", "#8662c7", "#12939a")


def plot_results(results: list[CacheResult], path: Path) -> None:
    """Draw into a file; its suffix says the format."""
    routed = [result for result in results if result.replicas > 1]
    names = dict.fromkeys((result.trace, result.replicas) for result in routed or results)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(names), figsize=(4.6 * len(names), 4.2), layout="constrained", squeeze=False
        )
        for axes, (trace, replicas) in zip(panels[0], names, strict=True):
            own = [r for r in results if (r.trace, r.replicas) == (trace, replicas)]
            if routed:
                _routing_panel(axes, f"{trace}, {replicas} replicas", own)
            else:
                _panel(axes, trace, own)
        figure.savefig(path, dpi=144)
        plt.close(figure)


def _routing_panel(axes: Any, title: str, results: list[CacheResult]) -> None:
    """A row for each rule: mean and 99th percentile of TTFT, and the hit rate at the right."""
    axes.set_title(title)
    axes.set_xlabel("TTFT, seconds: mean (filled) and 99th percentile")
    axes.set_xscale("log", subs=(2, 5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(results)), [result.router for result in results])
    axes.invert_yaxis()
    for row, result in enumerate(results):
        if (ttft := result.ttft_ms) is None:
            continue
        mean_s, p99_s = ttft.mean / 1e3, ttft.p99 / 1e3
        color = COLORS[1] if result.router == "radixrt" else COLORS[0]
        axes.plot([mean_s, p99_s], [row, row], "-", color=color, linewidth=1)
        axes.plot([mean_s], [row], "o", color=color)
        axes.plot([p99_s], [row], "o", color=color, markerfacecolor="white")
        axes.annotate(
            f"{result.hit_percent:.1f} %",
            (1.02, row),
            xycoords=("axes fraction", "data"),
            verticalalignment="center",
            fontsize=8,
        )
    axes.annotate("hits", (1.02, -0.5), xycoords=("axes fraction", "data"), fontsize=8, color=FAINT)


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
