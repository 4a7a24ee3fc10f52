"""Writes a trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

A run is a process, each of its states (the program's own and its forks) is a thread. A call is a
slice, its phases are slices inside it, and an arrow goes from a call to each call that waited for
it. Format: "Trace Event Format" of the Chromium project.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from radixrt.lang.tracing.records import (
    CallRecord,
    RunRecord,
    ToolRecord,
    phases_of,
    span_of,
    title_of,
)

Event = dict[str, Any]
ANSWER_CHARS = 4000
"""Characters of an answer in the arguments of its slice."""


def chrome_trace(runs: Sequence[RunRecord], now: float) -> dict[str, Any]:
    """The JSON object of a trace.

    Args:
        now: where runs and calls that have not ended are cut off, in seconds of
            ``time.monotonic()``.
    """
    start, _ = span_of(runs, now)
    events = [
        event for pid, run in enumerate(runs, 1) for event in _RunEvents(run, pid, start, now).all()
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title_of(runs)},
    }


class _RunEvents:
    """The events of one run, which may still go on."""

    def __init__(self, run: RunRecord, pid: int, start: float, now: float) -> None:
        self._run = run
        self._calls = list(run.calls)
        self._tools = list(run.tools)
        self._pid = pid
        self._start = start
        self._end = now if run.ended_at is None else run.ended_at
        self._threads: dict[tuple[str, int], int] = {}
        """The thread of each branch and lane."""
        self._places: dict[int, tuple[int, float, float]] = {}
        """Thread, start and end of the slice of each call, by the ``id`` of its record."""

    def all(self) -> Iterator[Event]:
        yield self._event("M", "process_name", args={"name": self._run.name})
        slices = [*self._slices()]
        for (branch, lane), tid in self._threads.items():
            name = ("state " if branch == "0" else "fork ") + branch + f" ({lane})" * (lane > 1)
            yield self._event("M", "thread_name", tid, args={"name": name})
            yield self._event("M", "thread_sort_index", tid, args={"sort_index": tid})
        yield from slices
        yield from self._arrows()

    def _slices(self) -> Iterator[Event]:
        """Each call and tool in the first lane of its branch that is free; slices of one thread
        never overlap."""
        items: list[CallRecord | ToolRecord] = [*self._calls, *self._tools]
        branches = {"0", *(item.branch for item in items)}
        for branch in sorted(branches, key=lambda name: [int(part) for part in name.split(".")]):
            self._thread(branch, 1)
            lanes: list[float] = []
            """When each lane becomes free."""
            of_branch = [item for item in items if item.branch == branch]
            for item in sorted(of_branch, key=self._bounds):
                begin, end = self._bounds(item)
                lane = next((n for n, free in enumerate(lanes) if free <= begin), len(lanes))
                lanes[lane : lane + 1] = [end]
                tid = self._thread(branch, lane + 1)
                if isinstance(item, ToolRecord):
                    name = f"tool {item.name}"
                    yield self._slice("tool", name, tid, begin, end, error=item.error)
                    continue
                self._places[id(item)] = (tid, begin, end)
                yield self._slice("call", item.what, tid, begin, end, **_arguments(item))
                for phase in phases_of(item, end):
                    if phase.end > begin:
                        start = max(phase.start, begin)
                        yield self._slice("phase", phase.name, tid, start, phase.end)

    def _bounds(self, item: CallRecord | ToolRecord) -> tuple[float, float]:
        """Start and end of a slice. A call that waits for another one of its state begins where
        that one ends."""
        end = max(self._end if item.ended_at is None else item.ended_at, self._run.started_at)
        if isinstance(item, ToolRecord):
            return item.started_at, max(end, item.started_at)
        begin = item.written_at
        if item.after is not None and item.after.branch == item.branch:
            begin = max(begin, end if item.after.ended_at is None else item.after.ended_at)
        return min(begin, end), end

    def _arrows(self) -> Iterator[Event]:
        """Arrows from a call to the next one of its transcript, and to the first call written after
        the program read its value."""
        by_time = sorted(self._calls, key=lambda call: call.written_at)
        for call in self._calls:
            if call.after is not None:
                yield from self._arrow(call.after, call)
            if call.read_at is not None:
                place = bisect.bisect_left(
                    by_time, call.read_at, key=lambda other: other.written_at
                )
                for following in by_time[place : place + 1]:
                    if following.after is not call:
                        yield from self._arrow(call, following)

    def _arrow(self, one: CallRecord, other: CallRecord) -> Iterator[Event]:
        """An arrow within the two slices, from the last microsecond of the one to the start of the
        other."""
        if id(one) not in self._places or id(other) not in self._places:
            return
        source, start, end = self._places[id(one)]
        target, begin, _ = self._places[id(other)]
        fields = {"cat": "flow", "id": f"{self._pid}.{id(one)}.{id(other)}"}
        yield self._event("s", "then", source, max(end - 1e-6, start), **fields)
        yield self._event("f", "then", target, begin, bp="e", **fields)

    def _thread(self, branch: str, lane: int) -> int:
        return self._threads.setdefault((branch, lane), len(self._threads) + 1)

    def _slice(
        self, kind: str, name: str, tid: int, start: float, end: float, **args: Any
    ) -> Event:
        dur = self._ts(end) - self._ts(start)
        given = {name: value for name, value in args.items() if value is not None}
        return self._event("X", name, tid, start, dur=dur, cat=kind, args=given)

    def _event(
        self, ph: str, name: str, tid: int = 0, at: float | None = None, **fields: Any
    ) -> Event:
        ts = self._ts(self._start if at is None else at)
        return {"ph": ph, "name": name, "pid": self._pid, "tid": tid, "ts": ts, **fields}

    def _ts(self, at: float) -> int:
        """Microseconds since the start of the trace."""
        return round((at - self._start) * 1e6)


def _arguments(call: CallRecord) -> dict[str, Any]:
    """Token counts, texts and the line of the program."""
    usage = call.usage
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    return {
        "source": f"{call.source.file}:{call.source.line}",
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": round(cached / prompt, 3) if prompt else None,
        "completion_tokens": usage.completion_tokens,
        "prompt_end": call.prompt_tail,
        "answer": call.answer[:ANSWER_CHARS],
        "tool_calls": call.called or None,
        "error": call.error,
    }
