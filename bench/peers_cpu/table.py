"""Makes the table of the runs: a row for each workload and engine, with medians over the rounds."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.peers_cpu.engines import Engine
from bench.peers_cpu.measuring import Run
from bench.peers_cpu.tasks import Workload

Results = Mapping[tuple[str, str], Sequence[Run | str]]
"""Runs by workload and engine, one a round, or why there is none."""

HEAD = (
    "| workload | engine | output tokens/s | TTFT p50, ms | ITL p50, ms | cached tokens | failed | finished, valid | right; a second |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|"
)


def table(workloads: Sequence[Workload], engines: Sequence[Engine], results: Results) -> str:
    """The table in markdown."""
    lines = [HEAD]
    for workload in workloads:
        for engine in engines:
            if rounds := results.get((workload.name, engine.name)):
                row = _row(engine, rounds)
                lines.append(f"| ({workload.name}) {workload.what} | {engine.name} | {row} |")
    return "\n".join(lines)


def _row(engine: Engine, rounds: Sequence[Run | str]) -> str:
    runs = [run for run in rounds if isinstance(run, Run)]
    reasons = [why for why in rounds if isinstance(why, str)]
    reasons += [why for run in runs for why in run.summary.errors]
    failed = sum(run.summary.failed for run in runs)
    good = [run for run in runs if run.summary.succeeded]
    if not good:
        return f"failed: {_cell(reasons[0])} | | | | | | "
    summaries = [run.summary for run in good]
    speeds = [summary.output_tokens_per_s for summary in summaries]
    cells = [
        f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})",
        _median([s.ttft_ms.p50 for s in summaries if s.ttft_ms], "{:.0f}".format),
        _median([s.itl_ms.p50 for s in summaries if s.itl_ms], "{:.1f}".format),
        _median([s.cached_tokens for s in summaries], "{:.0f}".format)
        if engine.reports_cached_tokens
        else "",
        f"{failed}{' and ' + str(len(rounds) - len(runs)) + ' rounds' if len(runs) < len(rounds) else ''}"
        + (f": {_cell(reasons[0])}" if reasons else ""),
        _judged(good),
        _right(good),
    ]
    return " | ".join(cells)


def _median(values: Sequence[float], write: Callable[[float], str]) -> str:
    return write(statistics.median(values)) if values else ""


def _judged(runs: Sequence[Run]) -> str:
    answers = [run.answers for run in runs if run.answers]
    if not answers:
        return ""
    asked = sum(each.asked for each in answers)
    valid = [each.valid for each in answers if each.valid is not None]
    return f"{sum(each.finished for each in answers)}, {sum(valid) if valid else '-'} of {asked}"


def _right(runs: Sequence[Run]) -> str:
    """Right answers of all rounds, and the median of right answers a second."""
    judged = [(run.answers, run.summary) for run in runs if run.answers]
    known = [(a.asked, a.right, a.right / s.duration_s) for a, s in judged if a.right is not None]
    if not known:
        return ""
    asked, right, rates = zip(*known, strict=True)
    return f"{sum(right)} of {sum(asked)}; {statistics.median(rates):.2f}"


def _cell(text: str) -> str:
    """The text on one line, without what would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")[:200]
