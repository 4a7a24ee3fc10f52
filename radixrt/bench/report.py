"""Reports of benchmarks: percentiles and throughput from the records of requests, as a table and as
JSON, and the comparison of two such reports."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixrt.base.errors import ConfigError
from radixrt.bench.client import RequestRecord


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def from_seconds(seconds: Sequence[float]) -> "Percentiles | None":
        """None if nothing was measured."""
        if not seconds:
            return None
        milliseconds = np.asarray(seconds) * 1e3
        p50, p90, p99 = np.percentile(milliseconds, (50, 90, 99)).tolist()
        return Percentiles(float(milliseconds.mean()), p50, p90, p99)


@dataclass(frozen=True)
class Goodput:
    """The requests that meet all service-level objectives (DistServe, Zhong et al. 2024)."""

    objectives_ms: dict[str, float]
    """ttft, tpot, e2e: longest latency in milliseconds."""
    requests: int
    share: float
    """Share of all requests, failed ones included."""
    requests_per_s: float


@dataclass(frozen=True)
class Summary:
    """A run in numbers; tokens and latencies are of the requests that succeeded."""

    duration_s: float
    """Time from the first request to the last token."""
    succeeded: int
    failed: int
    errors: dict[str, int]
    """How often each message came."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt tokens, cached or not, and output tokens."""
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    """Over all gaps between tokens of all requests."""
    tpot_ms: Percentiles | None
    """Over requests: mean gap of each."""
    e2e_ms: Percentiles | None
    goodput: "Goodput | None" = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    records: Sequence[RequestRecord], objectives_ms: dict[str, float] | None = None
) -> Summary:
    """Work out the numbers of a run."""
    good = [record for record in records if not record.error]
    start = min((record.sent for record in records), default=0.0)
    duration = max((record.finished for record in records), default=0.0) - start
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        duration_s=duration,
        succeeded=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error)),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=output_tokens,
        requests_per_s=len(good) * per_second,
        output_tokens_per_s=output_tokens * per_second,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_second,
        ttft_ms=Percentiles.from_seconds([record.ttft for record in good]),
        itl_ms=Percentiles.from_seconds(
            [gap for record in good for gap in record.inter_token_latencies]
        ),
        tpot_ms=Percentiles.from_seconds([r.tpot for r in good if r.tpot is not None]),
        e2e_ms=Percentiles.from_seconds([record.e2e for record in good]),
        goodput=_goodput(good, objectives_ms, len(records), per_second) if objectives_ms else None,
    )


def _goodput(
    good: Sequence[RequestRecord], objectives_ms: dict[str, float], total: int, per_second: float
) -> Goodput:
    def meets_all(record: RequestRecord) -> bool:
        seconds = {name: getattr(record, name) for name in objectives_ms}
        return all((seconds[name] or 0.0) * 1e3 <= limit for name, limit in objectives_ms.items())

    count = sum(map(meets_all, good))
    return Goodput(objectives_ms, count, count / total if total else 0.0, count * per_second)


def request_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Each request as JSON; times in seconds since the first was sent."""
    start = min((record.sent for record in records), default=0.0)
    return [
        {
            "conversation": record.conversation,
            "turn": record.turn,
            "sent_s": record.sent - start,
            "ttft_s": record.ttft if record.token_times else None,
            "e2e_s": record.e2e if record.token_times else None,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "error": record.error,
        }
        for record in sorted(records, key=lambda record: record.sent)
    ]


def print_summary(summary: Summary, console: Console, title: str) -> None:
    """Print two tables: counts, and latencies."""
    console.print()
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    console.print(_throughput_table(summary))
    console.print(_latency_table(summary))
    for message, count in summary.errors.items():
        console.print(f"[red]{count} failed:[/red] {escape(message)}", highlight=False)


def _throughput_table(summary: Summary) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    share = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    failed = f", [red]{summary.failed} failed[/red]" if summary.failed else ""
    table.add_row("requests", f"{summary.succeeded:,}{failed}")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("requests/s", f"{summary.requests_per_s:,.2f}")
    table.add_row("output tokens/s", f"[bold]{summary.output_tokens_per_s:,.1f}[/bold]")
    table.add_row("total tokens/s", f"{summary.total_tokens_per_s:,.1f}")
    table.add_row("prompt tokens", f"{summary.prompt_tokens:,}")
    table.add_row("  from the cache", f"{summary.cached_tokens:,} ({share:.1%})")
    table.add_row("output tokens", f"{summary.output_tokens:,}")
    if (goodput := summary.goodput) is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput.objectives_ms.items())
        table.add_row(
            f"goodput ({limits})", f"{goodput.requests_per_s:,.2f} requests/s ({goodput.share:.1%})"
        )
    return table


def _latency_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("latency, ms", style="dim")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    rows = {
        "time to first token (TTFT)": summary.ttft_ms,
        "between tokens (ITL)": summary.itl_ms,
        "per output token (TPOT)": summary.tpot_ms,
        "whole request (E2E)": summary.e2e_ms,
    }
    for name, latency in rows.items():
        if latency is not None:
            values = (latency.mean, latency.p50, latency.p90, latency.p99)
            table.add_row(name, *(f"{value:,.2f}" for value in values))
    return table


_RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
_LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def compare_runs(before: Path, after: Path, console: Console) -> None:
    """Print the numbers of both runs and their ratios.

    Raises:
        ConfigError: a file is no run.
    """
    documents = _document(before), _document(after)
    first, second = (document["summary"] for document in documents)
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="dim")
    for column in (before.name, after.name, "ratio"):
        table.add_column(column, justify="right")
    for name in _RATES:
        _add(table, name.replace("_per_s", "/s").replace("_", " "), first[name], second[name])
    for name, title in _LATENCIES.items():
        for percentile in ("p50", "p99"):
            values = [(run[name] or {}).get(percentile) for run in (first, second)]
            _add(table, f"{title} {percentile}, ms", *values)
    if first.get("goodput") and second.get("goodput"):
        rates = (run["goodput"]["requests_per_s"] for run in (first, second))
        _add(table, "goodput, requests/s", *rates)
    console.print(table)
    if different := _different_settings(*documents):
        console.print(f"The runs differ in {', '.join(different)}.", style="yellow")


def _add(table: Table, name: str, before: float | None, after: float | None) -> None:
    if before is None or after is None:
        return
    ratio = f"{after / before:.3f}" if before else "-"
    table.add_row(name, f"{before:,.2f}", f"{after:,.2f}", ratio)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read as a run: {error}.") from error
    if not {"summary", "settings"} <= set(document):
        raise ConfigError(f"{path} is no run: write one with --json FILE.")
    return document


def _different_settings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the settings of the load in which two runs differ."""
    of_output = {"json", "plot", "compare", "url", "base_url"}
    first, second = before["settings"], after["settings"]
    names = (set(first) | set(second)) - of_output
    return sorted(
        f"--{name.replace('_', '-')}" for name in names if first.get(name) != second.get(name)
    )


def console_beside(json_file: str | None) -> Console:
    """For tables; on stderr where stdout (``-``) is for JSON."""
    return Console(stderr=json_file == "-")


def check_folders(*files: str | None) -> None:
    """Check before a measurement that its results can be written; ``-`` and None need no folder.

    Raises:
        ConfigError: the folder of a file does not exist.
    """
    for file in files:
        if file and file != "-" and not Path(file).parent.is_dir():
            raise ConfigError(
                f"{file} cannot be written: the folder {Path(file).parent} is missing."
            )


def write_json(json_file: str | None, content: Any) -> None:
    """Into a file, to stdout for ``-``, or nowhere."""
    text = json.dumps(content, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file:
        Path(json_file).write_text(text)
