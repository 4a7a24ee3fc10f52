"""Plots a run: distributions of latency at the top, the timeline at the bottom."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

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
