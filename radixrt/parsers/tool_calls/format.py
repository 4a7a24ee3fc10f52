"""The interface of a tool-call format, and what a format's reader hands its calls to."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from radixrt.constrained.tool_calls import CallSyntax
from radixrt.messages.message import ToolCall
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner

ToolSchemas = Mapping[str, Any]
"""The JSON schemas of the parameters of a request's tools, by the tool's name."""


class ToolCallFormat(CallSyntax):
    """A way in which models write tool calls: the syntax for constraints, a rule that recognises
    it, and a reader."""

    closings: tuple[str, ...] = ()
    """They end calls. One that stands alone is dropped from the content."""
    other_marks: tuple[str, ...] = ()
    """Further marks that may be control tokens, which the text has to show."""
    template_marks: tuple[str, ...]
    """The format is recognised by these texts in the chat template, ..."""
    foreign_marks: tuple[str, ...] = ()
    """... unless it has one of these."""
    begins_answer: bool = False
    """Calls stand at the beginning of an answer alone."""

    @property
    def marks(self) -> set[str]:
        return {*self.openings, *self.closings, *self.other_marks}

    def recognises(self, marks: ModelMarks) -> bool:
        """Whether a model with this chat template and vocabulary was trained on the format."""
        has_foreign = any(map(marks.in_template, self.foreign_marks))
        return marks.in_template(*self.template_marks) and not has_foreign

    @abstractmethod
    def read(
        self, text: Scanner, mark: str, calls: "CallSink", tools: ToolSchemas
    ) -> Reading[None]:
        """Read the call, or the list of calls, behind an opening that has just been taken.

        Raises:
            NoCallError: there is none.
        """


class CallSink:
    """Takes the calls of an answer from a format's reader.

    Args:
        in_pieces: pass on each part at once; otherwise a call is passed on when it is complete, and
            checked.
    """

    def __init__(self, *, in_pieces: bool) -> None:
        self.in_pieces = in_pieces
        self.num_calls = 0
        self._name: str | None = None
        self._arguments: list[str] = []
        self._new: list[ToolCall] = []

    @property
    def has_sent_a_part(self) -> bool:
        """Some of the open call has been passed on."""
        return self.in_pieces and self._name is not None

    def begin(self, name: str) -> None:
        self._name, self._arguments = name, []
        if self.in_pieces:
            self._new.append(ToolCall(self.num_calls, name, ""))

    def add(self, arguments: str) -> None:
        """The next piece of the arguments' JSON."""
        if not self.in_pieces:
            self._arguments.append(arguments)
        elif arguments:
            name = ""
            if self._new and self._new[-1].index == self.num_calls:
                last = self._new.pop()
                name, arguments = last.name, last.arguments + arguments
            self._new.append(ToolCall(self.num_calls, name, arguments))

    def end(self) -> None:
        """Raises NoCallError if the call could not be passed on: it has no name, or arguments that
        are no JSON object."""
        if not self.in_pieces:
            self._new.append(self._checked())
        self.num_calls += 1
        self._name = None

    def call(self, name: Any, arguments: Any) -> None:
        """A whole call."""
        self.begin(name)
        self.add(as_json(arguments))
        self.end()

    def drop(self) -> None:
        """The open call is none."""
        self._name = None

    def take(self) -> list[ToolCall]:
        new, self._new = self._new, []
        return new

    def _checked(self) -> ToolCall:
        try:
            arguments = json.loads("".join(self._arguments))
            if not isinstance(self._name, str) or not isinstance(arguments, dict):
                raise NoCallError
            text = as_json(arguments)
            (self._name + text).encode()
        except (ValueError, RecursionError) as error:  # wrong JSON, numbers, surrogates or depth
            raise NoCallError from error
        return ToolCall(self.num_calls, self._name, text)


def as_json(value: Any) -> str:
    """Raises NoCallError if JSON has no such value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NoCallError from error
