"""Records of one run: its calls of the model and its calls of tools, with token counts, times and
the phases of the times.

All times are of ``time.monotonic()``, in seconds. None: the moment has not come yet, or never will.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from radixrt.lang.backends.protocol import Prompt, ServerTimes, Usage
from radixrt.lang.errors import SourceLine

PROMPT_TAIL_CHARS = 600
"""Characters kept of a prompt's end. Whole prompts would hold a long conversation in memory once
for each call."""
PROMPT_TAIL_MESSAGES = 4


@dataclass
class CallRecord:
    """One gen or select."""

    name: str | None
    what: str
    """Such as ``gen("verdict")``."""
    source: SourceLine
    branch: str
    """The state of the call: "0" is the program's own, "0.2" its third fork."""
    after: "CallRecord | None" = None
    """The last call in the transcript before this one; this one waits for it."""
    written_at: float = field(default_factory=time.monotonic)
    """The program appended the call."""
    ready_at: float | None = None
    """Everything before the call was computed."""
    sent_at: float | None = None
    """The call was sent: at once, or when its run was admitted in a batch."""
    first_piece_at: float | None = None
    """The first text came; without streaming, the whole answer."""
    ended_at: float | None = None
    read_at: float | None = None
    """The program first read the value."""
    usage: Usage = field(default_factory=Usage)
    times: ServerTimes | None = None
    streamed: bool = False
    prompt_tail: str = ""
    answer: str = ""
    called: list[str] = field(default_factory=list)
    """The tool calls in the answer."""
    error: str | None = None

    def was_read(self) -> None:
        if self.read_at is None:
            self.read_at = time.monotonic()


@dataclass
class ToolRecord:
    """One run of a tool that the model had called."""

    name: str
    branch: str
    """The state whose gen called the tool."""
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    error: str | None = None


ToolNotes = Callable[[str], AbstractContextManager[Any]]
"""Records that the tool of a name runs inside the block."""


@dataclass
class RunRecord:
    """One run of a program."""

    name: str = "program"
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    calls: list[CallRecord] = field(default_factory=list)
    """Calls in program order."""
    tools: list[ToolRecord] = field(default_factory=list)

    def tools_of(self, branch: str) -> ToolNotes:
        """Recorder of the tools that a state's answers call."""
        return partial(self._tool_runs, branch)

    @contextmanager
    def _tool_runs(self, branch: str, name: str) -> Iterator[None]:
        record = ToolRecord(name, branch)
        self.tools.append(record)
        try:
            yield
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            record.ended_at = time.monotonic()


def tail_of(prompt: Prompt) -> str:
    """The last characters of a prompt; each message after its role."""
    if isinstance(prompt, str):
        return prompt[-PROMPT_TAIL_CHARS:]
    last = prompt[-PROMPT_TAIL_MESSAGES:]
    text = "\n".join(f"{message['role']}: {message['content']}" for message in last)
    return text[-PROMPT_TAIL_CHARS:]


PhaseName = Literal[
    "waiting", "held", "sending", "queued", "prefill", "first token", "decoding", "answering"
]
"""waiting: for the calls before it. held: until the batch admits its run. sending: transport and
encoding. queued: in the server's queue. prefill: until the first token, by the server's report;
first token: the same, by the stream. decoding: all further tokens. answering: the whole answer,
where neither server nor stream tells more."""

SHORTEST_S = 1e-5
"""Shorter phases are left out."""


@dataclass(frozen=True)
class Phase:
    """A part of a call's time; seconds of ``time.monotonic()``."""

    name: PhaseName
    start: float
    end: float


def phases_of(call: CallRecord, now: float) -> list[Phase]:
    """The phases of a call in order, each beginning where the one before it ends.

    Args:
        now: the end of a call that has not ended.
    """
    end = now if call.ended_at is None else call.ended_at
    ready = end if call.ready_at is None else call.ready_at
    sent = end if call.sent_at is None else call.sent_at
    phases = [Phase("waiting", call.written_at, ready), Phase("held", ready, sent)]
    if call.sent_at is not None:
        phases += _after_sending(call, sent, end)
    return [phase for phase in phases if phase.end - phase.start >= SHORTEST_S]


def _after_sending(call: CallRecord, sent: float, end: float) -> list[Phase]:
    if call.times is not None:
        # Two clocks: the server's durations are laid so that they end with the call.
        arrived = max(sent, end - call.times.total_s)
        planned = min(arrived + call.times.queued_s, end)
        first = min(planned + call.times.prefill_s, end)
        return [
            Phase("sending", sent, arrived),
            Phase("queued", arrived, planned),
            Phase("prefill", planned, first),
            Phase("decoding", first, end),
        ]
    if call.streamed:
        first = end if call.first_piece_at is None else call.first_piece_at
        return [Phase("first token", sent, first), Phase("decoding", first, end)]
    return [Phase("answering", sent, end)]


def span_of(runs: Sequence[RunRecord], now: float) -> tuple[float, float]:
    """The first start and the last end of the runs."""
    return (
        min((run.started_at for run in runs), default=now),
        max((run.ended_at or now for run in runs), default=now),
    )


def title_of(runs: Sequence[RunRecord]) -> str:
    names = ", ".join(dict.fromkeys(run.name for run in runs)) or "nothing"
    return names if len(runs) == 1 else f"{names} · {len(runs)} runs"
