"""What did a run do, and when? Its calls, branches and tools, noted down for those who look at it afterwards.

All times are of ``time.monotonic()``, in seconds; None: not yet, or never.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from radixrt.lang.backends.protocol import Prompt, ServerTimes, Usage
from radixrt.lang.source_line import SourceLine

LONGEST_TAIL = 600
"""Characters of a prompt's end that are kept. Whole prompts would hold the memory of a long conversation once a call."""


@dataclass
class CallRecord:
    """One gen or select."""

    name: str | None
    what: str
    """Such as ``gen("verdict")``."""
    source: SourceLine
    branch: str
    """The state it belongs to: "0" is the program's own, "0.2" its third fork."""
    written_at: float = field(default_factory=time.monotonic)
    """The program appended it."""
    ready_at: float | None = None
    """What comes before it was there."""
    sent_at: float | None = None
    """The call was sent: at once, or when its run's turn in a batch came."""
    first_piece_at: float | None = None
    """Of an answer that does not stream: when it came."""
    ended_at: float | None = None
    read_at: float | None = None
    """The program first asked for its value and got it."""
    usage: Usage = field(default_factory=Usage)
    times: ServerTimes | None = None
    streamed: bool = False
    prompt_tail: str = ""
    """The end of what it answers."""
    answer: str = ""
    called: list[str] = field(default_factory=list)
    """The calls of tools in the answer."""
    error: str | None = None

    def was_read(self) -> None:
        if self.read_at is None:
            self.read_at = time.monotonic()


@dataclass(frozen=True)
class BranchesRecord:
    """A fork: a state was copied. Or a join: the program had what it wanted of several branches."""

    branches: tuple[str, ...]
    at: float = field(default_factory=time.monotonic)


@dataclass
class ToolRecord:
    """The program ran a tool that the model had called."""

    name: str
    branch: str
    """The state whose gen called it."""
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    error: str | None = None


ToolNotes = Callable[[str], AbstractContextManager[Any]]
"""Takes down that the tool of a name runs inside the block."""


@dataclass
class RunRecord:
    """One run of a program."""

    name: str = "program"
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    calls: list[CallRecord] = field(default_factory=list)
    """In the order in which they were written."""
    forks: list[BranchesRecord] = field(default_factory=list)
    joins: list[BranchesRecord] = field(default_factory=list)
    tools: list[ToolRecord] = field(default_factory=list)

    def tools_of(self, branch: str) -> ToolNotes:
        """For the tools that a state's answers call."""
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
    """The last characters of what a call answers, each message after its role."""
    if isinstance(prompt, str):
        return prompt[-LONGEST_TAIL:]
    tail = ""
    for message in reversed(prompt):
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        called = f" [calls {', '.join(calls)}]" if calls else ""
        tail = f"{message['role']}: {message['content'][-LONGEST_TAIL:]}{called}\n{tail}"
        if len(tail) >= LONGEST_TAIL:
            break
    return tail[-LONGEST_TAIL:].rstrip("\n")
