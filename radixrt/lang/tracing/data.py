"""How does a trace look as plain data? Branches, calls, forks, joins and tools, in seconds from its beginning."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radixrt.lang.records import CallRecord, JoinRecord, RunRecord
from radixrt.lang.tracing.phases import first_token_after_s, phases_of

if TYPE_CHECKING:
    from radixrt.lang.tracing.trace import Trace

ROOT = "0"
"""A run's own state."""
LONGEST_ANSWER = 4000
"""Characters of an answer that a page holds."""


def data_of(trace: "Trace") -> dict[str, Any]:
    start = min((run.started_at for run in trace.runs), default=trace.made_at)
    clock = _Clock(start, trace.made_at)
    return {
        "title": _title(trace.runs),
        "duration": clock.after_start(
            max((_end(run, clock.now) for run in trace.runs), default=start)
        ),
        "runs": [_run(run, clock) for run in trace.runs],
    }


class _Clock:
    """Seconds from the beginning of a trace, to the microsecond."""

    def __init__(self, start: float, now: float) -> None:
        self._start = start
        self.now = now

    def after_start(self, moment: float) -> float:
        return round(moment - self._start, 6)

    def maybe(self, moment: float | None) -> float | None:
        return None if moment is None else self.after_start(moment)


def _title(runs: list[RunRecord]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return shown if len(runs) == 1 else f"{shown or 'nothing'} · {len(runs)} runs"


def _end(run: RunRecord, now: float) -> float:
    return now if run.ended_at is None else run.ended_at


def _run(run: RunRecord, clock: _Clock) -> dict[str, Any]:
    return {
        "name": run.name,
        "start": clock.after_start(run.started_at),
        "end": clock.maybe(run.ended_at),
        "branches": _branches(run, clock),
        "calls": [_call(call, clock, _end(run, clock.now)) for call in list(run.calls)],
        "joins": [
            {
                "branches": list(join.branches),
                "into": _parent(join.branches[0]),
                "at": clock.after_start(join.at),
            }
            for join in (*run.joins, *_joins_by_reading(run))
        ],
        "tools": [
            {
                "name": tool.name,
                "branch": tool.branch,
                "start": clock.after_start(tool.started_at),
                "end": clock.maybe(tool.ended_at),
                "error": tool.error,
            }
            for tool in list(run.tools)
        ],
    }


def _branches(run: RunRecord, clock: _Clock) -> list[dict[str, Any]]:
    """In the order in which a person would read them: each before those that come out of it."""
    begun = {branch: fork.at for fork in list(run.forks) for branch in fork.branches}
    ordered = sorted([ROOT, *begun], key=lambda branch: [int(part) for part in branch.split(".")])
    return [
        {
            "id": branch,
            "parent": None if branch == ROOT else _parent(branch),
            "start": clock.after_start(begun.get(branch, run.started_at)),
        }
        for branch in ordered
    ]


def _parent(branch: str) -> str:
    return branch.rpartition(".")[0]


def _call(call: CallRecord, clock: _Clock, run_end: float) -> dict[str, Any]:
    first_token = first_token_after_s(call)
    return {
        "name": call.name,
        "what": call.what,
        "branch": call.branch,
        "source": str(call.source),
        "file": call.source.file,
        "line": call.source.line,
        "written": clock.after_start(call.written_at),
        "sent": clock.maybe(call.sent_at),
        "end": clock.maybe(call.ended_at),
        "read": clock.maybe(call.read_at),
        "first_token": None if first_token is None else round(first_token, 6),
        "phases": [
            [phase.name, clock.after_start(phase.start), clock.after_start(phase.end)]
            for phase in phases_of(call, max(run_end, call.written_at))
        ],
        "tokens_in": call.usage.prompt_tokens,
        "tokens_cached": call.usage.cached_tokens,
        "tokens_out": call.usage.completion_tokens,
        "prompt": call.prompt_tail,
        "answer": call.answer[:LONGEST_ANSWER],
        "called": list(call.called),
        "error": call.error,
    }


def _joins_by_reading(run: RunRecord) -> Iterator[JoinRecord]:
    """Forks whose every branch the program has read from, one value after another, without saying join."""
    joined = {branch for join in list(run.joins) for branch in join.branches}
    read: dict[str, float] = {}
    for call in list(run.calls):
        if call.read_at is not None:
            read[call.branch] = max(call.read_at, read.get(call.branch, 0.0))
    for fork in list(run.forks):
        if all(branch in read and branch not in joined for branch in fork.branches):
            yield JoinRecord(fork.branches, max(read[branch] for branch in fork.branches))
