"""How does a trace look as plain data? Branches, calls, forks, joins and tools, in seconds from its beginning."""

from collections.abc import Iterator, Sequence
from typing import Any

from radixrt.lang.records import BranchesRecord, CallRecord, RunRecord
from radixrt.lang.tracing.phases import first_token_after_s, phases_of

ROOT = "0"
"""A run's own state."""
LONGEST_ANSWER = 4000
"""Characters of an answer that a page holds."""


def data_of(runs: Sequence[RunRecord], now: float) -> dict[str, Any]:
    """
    Args:
        now: where what has not ended yet is cut off; of ``time.monotonic()``.
    """
    clock = _Clock(min((run.started_at for run in runs), default=now), now)
    return {
        "title": _title(runs),
        "duration": max((clock(clock.end_of(run)) for run in runs), default=0.0),
        "runs": [_run(run, clock) for run in runs],
    }


class _Clock:
    """Seconds from the beginning of a trace, to the microsecond."""

    def __init__(self, start: float, now: float) -> None:
        self._start = start
        self._now = now

    def __call__(self, moment: float | None) -> Any:
        """None stays None."""
        return None if moment is None else round(moment - self._start, 6)

    def end_of(self, run: RunRecord) -> float:
        return self._now if run.ended_at is None else run.ended_at


def _title(runs: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return shown if len(runs) == 1 else f"{shown or 'nothing'} · {len(runs)} runs"


def _run(run: RunRecord, clock: _Clock) -> dict[str, Any]:
    """A run that may go on meanwhile."""
    return {
        "name": run.name,
        "start": clock(run.started_at),
        "end": clock(run.ended_at),
        "branches": _branches(run, clock),
        "calls": [_call(call, clock, clock.end_of(run)) for call in list(run.calls)],
        "joins": [
            {"branches": [*one.branches], "into": _parent(one.branches[0]), "at": clock(one.at)}
            for one in (*run.joins, *_joins_by_reading(run))
        ],
        "tools": [
            {
                "name": tool.name,
                "branch": tool.branch,
                "start": clock(tool.started_at),
                "end": clock(tool.ended_at),
                "error": tool.error,
            }
            for tool in list(run.tools)
        ],
    }


def _branches(run: RunRecord, clock: _Clock) -> list[dict[str, Any]]:
    """In the order in which a person would read them: each before those that come out of it."""
    begun = {ROOT: run.started_at}
    begun |= {branch: fork.at for fork in list(run.forks) for branch in fork.branches}
    ordered = sorted(begun, key=lambda branch: [int(part) for part in branch.split(".")])
    return [
        {"id": branch, "parent": _parent(branch) or None, "start": clock(begun[branch])}
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
        "file": call.source.file,
        "line": call.source.line,
        "written": clock(call.written_at),
        "sent": clock(call.sent_at),
        "end": clock(call.ended_at),
        "first_token": None if first_token is None else round(first_token, 6),
        "phases": [
            [phase.name, clock(phase.start), clock(phase.end)]
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


def _joins_by_reading(run: RunRecord) -> Iterator[BranchesRecord]:
    """Forks whose every branch the program has read from, one value after another, without saying join."""
    joined = {branch for join in list(run.joins) for branch in join.branches}
    read: dict[str, float] = {}
    for call in list(run.calls):
        if call.read_at is not None:
            read[call.branch] = max(call.read_at, read.get(call.branch, 0.0))
    for fork in list(run.forks):
        if all(branch in read and branch not in joined for branch in fork.branches):
            yield BranchesRecord(fork.branches, max(read[branch] for branch in fork.branches))
