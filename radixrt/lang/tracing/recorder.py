"""Collects the records of runs into traces; shows them in a terminal, one line for each call with
its phases drawn as a bar, and saves them."""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any

from radixrt.lang.tracing.chrome import chrome_trace
from radixrt.lang.tracing.records import CallRecord, RunRecord, phases_of, span_of, title_of

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

_recording: "list[Recorder]" = []
_lock = threading.Lock()


class Trace:
    """A timeline of one run or several.

    ``print(trace)`` shows it as text. :meth:`save` writes Chrome trace events for ui.perfetto.dev
    or chrome://tracing.

    >>> print(Trace([]))
    nothing · 0 runs · 0 ms · 0 calls · 0 branches · 0 tokens in (0 cached) · 0 out
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = list(runs)
        self.made_at = time.monotonic()
        """End of the trace for unfinished calls, in seconds of ``time.monotonic()``."""

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of all runs, each run's in program order."""
        return [call for run in self.runs for call in run.calls]

    def data(self) -> dict[str, Any]:
        """The trace as Chrome trace events: the JSON object that :meth:`save` writes. Times are in
        microseconds."""
        return chrome_trace(self.runs, self.made_at)

    def save(self, path: str | Path) -> None:
        """Write the trace events as JSON."""
        Path(path).write_text(json.dumps(self.data(), separators=(",", ":")), encoding="utf-8")

    def __str__(self) -> str:
        return _text_of(self.runs, self.made_at)

    __repr__ = __str__


class Recorder(ContextDecorator):
    """Records all runs that begin inside ``with rl.trace("out.json"):``, in any thread, and saves
    them at the end.

    They are saved also after an error. Without ``with``: :meth:`start` and :meth:`stop`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """
        Args:
            path: the file for :meth:`Trace.save`; None: nothing is written.
        """
        self.path = path
        self._runs: list[RunRecord] = []

    def start(self) -> "Recorder":
        with _lock:
            _recording.append(self)
        return self

    def stop(self) -> Trace:
        """Record no more runs, and save the trace if there is a path."""
        with _lock:
            _recording.remove(self)
        trace = self.trace()
        if self.path is not None:
            trace.save(self.path)
        return trace

    def trace(self) -> Trace:
        """The runs that were recorded so far."""
        with _lock:
            return Trace(list(self._runs))

    def __enter__(self) -> "Recorder":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def tell_recorders(run: RunRecord) -> None:
    """Add a run that begins to all recorders."""
    with _lock:
        for recorder in _recording:
            recorder._runs.append(run)


def _text_of(runs: Sequence[RunRecord], now: float) -> str:
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
