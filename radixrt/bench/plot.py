"""Plots the results of benchmarks.

A run of ``radixrt bench serve``: distributions of latency at the top, the timeline at the bottom.
Results of ``radixrt bench cache``: hit rates over pool sizes, a panel for each trace, a line for
each policy, between LRU and the bounds. With several replicas: a panel for each trace and number of
replicas, with TTFT and hit rate of each routing rule.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from radixrt.bench.cache.result import CacheResult
from radixrt.bench.client import RequestRecord
from radixrt.bench.report import Percentiles, Summary

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
WAITING, CACHED, DECODING = "#f0b429", "#27ab83", "#4a7fc1"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
}


def plot_run(records: Sequence[RequestRecord], summary: Summary, title: str, path: Path) -> None:
    """Draw a run into a file; its suffix says the format."""
    good = sorted((r for r in records if not r.error), key=lambda record: record.sent)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(10, 7.5), layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(3, 3.4, 1.6))
        ttft, itl = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        timeline = figure.add_subplot(grid[1, :])
        throughput = figure.add_subplot(grid[2, :], sharex=timeline)
        gaps = [gap for record in good for gap in record.inter_token_latencies]
        _distribution(ttft, "Time to first token", [r.ttft for r in good], summary.ttft_ms, WAITING)
        _distribution(itl, "Between tokens", gaps, summary.itl_ms, DECODING)
        if good:
            _timeline(timeline, good)
            _throughput(throughput, good)
        cached = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
        figure.suptitle(
            f"{title}:  {summary.output_tokens_per_s:,.0f} output tokens/s, "
            f"{cached:.0%} of prompt tokens from the cache",
            x=0.01, ha="left", fontsize=11, fontweight="bold",
        )  # fmt: skip
        figure.savefig(path, dpi=144)
        plt.close(figure)


def _distribution(
    axes: Any, name: str, seconds: Sequence[float], marks: Percentiles | None, color: str
) -> None:
    """The share of observations up to each latency."""
    axes.set_title(name)
    axes.set_xlabel("milliseconds")
    axes.set_ylim(0, 1.02)
    axes.margins(x=0.16)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    if marks is None:
        return
    milliseconds = np.sort(np.asarray(seconds)) * 1e3
    share = np.arange(1, len(milliseconds) + 1) / len(milliseconds)
    axes.step(milliseconds, share, where="post", color=color, linewidth=2)
    axes.fill_between(milliseconds, share, step="post", color=color, alpha=0.12)
    if milliseconds[0] > 0 and milliseconds[-1] > 20 * milliseconds[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    for label, level, value in (("p50", 0.5, marks.p50), ("p90", 0.9, marks.p90), ("p99", 0.99, marks.p99)):  # fmt: skip
        axes.plot([value], [level], "o", color=color, markersize=5)
        axes.annotate(
            f"{label}  {value:,.1f} ms", (value, level), xytext=(7, -11), textcoords="offset points"
        )


def _timeline(axes: Any, good: Sequence[RequestRecord]) -> None:
    """A line for each request: waiting for the first token, then decoding."""
    start = good[0].sent
    rows = np.arange(len(good))
    sent = np.array([r.sent for r in good]) - start
    first = np.array([r.token_times[0] for r in good]) - start
    last = np.array([r.token_times[-1] for r in good]) - start
    hit = np.array([r.cached_tokens * 2 >= max(r.prompt_tokens, 1) for r in good])
    width = float(np.clip(170 / len(good), 0.5, 6))
    for mask, color, label in (
        (~hit, WAITING, "to the first token"),
        (hit, CACHED, "to the first token, at least half of the prompt cached"),
    ):
        if mask.any():
            axes.hlines(rows[mask], sent[mask], first[mask], color, linewidth=width, label=label)
    axes.hlines(rows, first, last, DECODING, linewidth=width, alpha=0.75, label="decoding")
    axes.set_title("Requests in order of arrival")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.tick_params(labelbottom=False)
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1, 0.99), ncols=3, fontsize=8)
    for handle in legend.legend_handles:
        handle.set_linewidth(4)


def _throughput(axes: Any, good: Sequence[RequestRecord]) -> None:
    """Output tokens per second over the run."""
    start = good[0].sent
    times = np.concatenate([r.token_times for r in good]) - start
    tokens = np.concatenate([r.token_counts for r in good])
    bins = min(100, max(10, len(times) // 50))
    counts, edges = np.histogram(times, bins=bins, range=(0, times.max()), weights=tokens)
    axes.stairs(counts / np.diff(edges), edges, fill=True, color=DECODING, alpha=0.35)
    axes.stairs(counts / np.diff(edges), edges, color=DECODING, linewidth=1.5)
    axes.set_title("Output tokens per second")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0)


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
                _hits_panel(axes, trace, own)
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


def _hits_panel(axes: Any, trace: str, results: list[CacheResult]) -> None:
    axes.set_title(trace)
    axes.set_xlabel("KV pool, million tokens")
    axes.set_ylabel("prompt tokens from the cache, %")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    several = len({result.schedule_policy for result in results}) > 1
    lines = list(dict.fromkeys(map(_policies, results)))
    for number, (schedule, eviction, hints) in enumerate(lines):
        rows = [row for row in results if _policies(row) == (schedule, eviction, hints)]
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


def _policies(result: CacheResult) -> tuple[str, str, str]:
    return result.schedule_policy, result.eviction_policy, result.hints
