"""Records of one run: its calls of the model and its calls of tools, with times and token counts.

All times are of ``time.monotonic()``, in seconds. None: the moment has not come yet, or never will.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
