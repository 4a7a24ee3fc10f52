"""Shows a trace in a terminal: one line for each call, its phases drawn as a bar."""

from collections.abc import Sequence

from radixrt.lang.tracing.phases import phases_of
from radixrt.lang.tracing.records import CallRecord, RunRecord

WIDTH = 48
"""Characters of the time axis."""
MAX_LINES = 200
MARKS = {
    "waiting": "·",
    "held": "·",
    "sending": "░",
    "queued": "░",
    "prefill": "▒",
    "first token": "▒",
    "decoding": "█",
    "answering": "█",
}
LEGEND = "· waiting  ░ sending, queued  ▒ until the first token  █ answering  ✗ failed"


def text_of(runs: Sequence[RunRecord], now: float) -> str:
    """The whole text.

    Args:
        now: where runs and calls that have not ended are cut off, in seconds of
            ``time.monotonic()``.
    """
    start, end = span_of(runs, now)
    calls = [
        (call.branch if len(runs) == 1 else f"{number}/{call.branch}", run.ended_at or now, call)
        for number, run in enumerate(runs, 1)
        for call in list(run.calls)
    ]
    shown = calls[:MAX_LINES]
    branch_width = max((len(branch) for branch, _, _ in shown), default=0)
    what_width = max((len(call.what) for _, _, call in shown), default=0)
    lines = [_summary(runs, end - start)]
    for branch, run_end, call in shown:
        bar = _bar(call, run_end, start, end)
        lines.append(
            f"{branch:<{branch_width}}  {call.what:<{what_width}}  {bar}  {_numbers(call, run_end)}".rstrip()
        )
    if len(calls) > len(shown):
        lines.append(f"… and {len(calls) - len(shown)} more calls; save the trace to see them.")
    if calls:
        lines.append(LEGEND)
    return "\n".join(lines)


def span_of(runs: Sequence[RunRecord], now: float) -> tuple[float, float]:
    """The first start and the last end of the runs."""
    return (
        min((run.started_at for run in runs), default=now),
        max((run.ended_at or now for run in runs), default=now),
    )


def title_of(runs: Sequence[RunRecord]) -> str:
    names = ", ".join(dict.fromkeys(run.name for run in runs)) or "nothing"
    return names if len(runs) == 1 else f"{names} · {len(runs)} runs"


def _summary(runs: Sequence[RunRecord], duration: float) -> str:
    calls = [call for run in runs for call in list(run.calls)]
    branches = sum(len({"0", *(call.branch for call in list(run.calls))}) for run in runs)
    tokens_in = sum(call.usage.prompt_tokens for call in calls)
    cached = sum(call.usage.cached_tokens for call in calls)
    tokens_out = sum(call.usage.completion_tokens for call in calls)
    failed = sum(call.error is not None for call in calls)
    parts = [
        title_of(runs), _seconds(duration), _count(len(calls), "call"), _count(branches, "branch", "branches"),
        f"{tokens_in:,} tokens in ({cached:,} cached)", f"{tokens_out:,} out",
    ]  # fmt: skip
    return " · ".join([*parts, *([f"{failed} failed"] if failed else [])])


def _bar(call: CallRecord, run_end: float, start: float, end: float) -> str:
    cells = [" "] * WIDTH
    per_cell = max(end - start, 1e-9) / WIDTH
    last = 0
    for phase in phases_of(call, run_end):
        first, last = (
            max(min(int((at - start) / per_cell), WIDTH - 1), 0) for at in (phase.start, phase.end)
        )
        cells[first : last + 1] = MARKS[phase.name] * (last + 1 - first)
    if call.error is not None:
        cells[last] = "✗"
    return "".join(cells)


def _numbers(call: CallRecord, run_end: float) -> str:
    usage = call.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    tokens = (
        f"{usage.prompt_tokens}{cached} → {usage.completion_tokens}" if usage.prompt_tokens else ""
    )
    error = f"  {call.error.splitlines()[0]:.80}" if call.error else ""
    duration = max((call.ended_at or run_end) - call.written_at, 0.0)
    return f"{_seconds(duration):>7}  {tokens}{error}"


def _seconds(duration: float) -> str:
    return f"{duration:.2f} s" if duration >= 1 else f"{duration * 1000:.0f} ms"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
