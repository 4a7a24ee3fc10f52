"""Finds the values of a growing JSON text: where each begins, and where it is complete."""

import json
import re

import msgspec

from radixrt.constrained.constraint import AnyJson, JsonSchema, Parameters, StructuralTag
from radixrt.messages.answers import JsonType, ValueEvent
from radixrt.messages.message import ToolCall
from radixrt.messages.requests import GenerateRequest

_SKIPPED = re.compile(r"[ \t\n\r:,]*")
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")

_VALUE, _NAME, _IN_STRING, _IN_NAME, _IN_WORD = range(5)
_TYPES: dict[str, JsonType] = {"{": "object", "[": "array", '"': "string", "n": "null",
                               "t": "boolean", "f": "boolean"}  # fmt: skip


class _Open:
    """A value that is not complete."""

    __slots__ = ("kind", "length", "piece", "pointer", "start")

    def __init__(self, kind: JsonType, pointer: str, piece: int, start: int) -> None:
        self.kind = kind
        self.pointer = pointer
        self.piece, self.start = piece, start
        """The place where it begins: which piece of the text, and which character of it."""
        self.length = 0
        """Elements of an array so far."""


class ValueTracker:
    """Follows one JSON text, which comes in pieces that may be cut anywhere.

    The grammar ensures that the text is JSON; other texts give meaningless events.

    >>> tracker = ValueTracker()
    >>> [(e.event, e.pointer, e.text) for e in tracker.push('{"a": [1, "x')]
    [('started', '', None), ('started', '/a', None), ('completed', '/a/0', '1'), ('started', '/a/1', None)]
    >>> [(e.event, e.pointer, e.text) for e in tracker.push('"]}')]
    [('completed', '/a/1', '"x"'), ('completed', '/a', '[1, "x"]'), ('completed', '', '{"a": [1, "x"]}')]
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._open: list[_Open] = []
        """The containers around the next value, and the open scalar."""
        self._state = _VALUE
        self._is_escaped = False
        self._name: tuple[int, int] = (0, 0)
        """The place where the last property name begins."""
        self._pointer = ""
        """The pointer of the next value, if it is a property."""
        self._events: list[ValueEvent] = []

    def push(self, text: str) -> list[ValueEvent]:
        """Take the next piece. Returns the values that begin or are complete in it, in this order.

        A number is complete only at the character after it, or at :meth:`finish`.
        """
        self._events = []
        self._pieces.append(text)
        at = 0
        while at < len(text):
            if self._state in (_IN_STRING, _IN_NAME):
                at = self._in_string(text, at)
            elif self._state == _IN_WORD:
                at = _end_of(_WORD, text, at)
                if at < len(text):
                    self._complete(at)
            else:
                at = _end_of(_SKIPPED, text, at)
                if at < len(text):
                    at = self._structure(text[at], at)
        return self._events

    def finish(self) -> list[ValueEvent]:
        """The text is complete. Returns the value that ends with it: a number alone."""
        self._events = []
        if self._state == _IN_WORD and len(self._open) == 1:
            self._complete(len(self._pieces[-1]))
        return self._events

    def _in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end_of(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._is_escaped = True
        elif self._state == _IN_STRING:
            self._complete(at + 1)
        else:
            name = _unquoted(self._text_since(*self._name, at + 1))
            self._pointer = f"{self._open[-1].pointer}/{name}"
            self._state = _VALUE
        return at + 1

    def _structure(self, character: str, at: int) -> int:
        """Take the character that begins a value or a name, or closes a container."""
        if character in "]}":
            if self._open:
                self._complete(at + 1)
        elif self._state == _NAME and character == '"':
            self._state, self._name = _IN_NAME, (len(self._pieces) - 1, at)
        else:
            self._begin(_TYPES.get(character, "number"), at)
        return at + 1

    def _begin(self, kind: JsonType, at: int) -> None:
        pointer = self._pointer
        if self._open and self._open[-1].kind == "array":
            array = self._open[-1]
            pointer = f"{array.pointer}/{array.length}"
            array.length += 1
        self._open.append(_Open(kind, pointer, len(self._pieces) - 1, at))
        if kind in ("object", "array", "string"):
            self._events.append(ValueEvent("started", pointer, kind))
            self._state = {"object": _NAME, "array": _VALUE}.get(kind, _IN_STRING)
        else:
            self._state = _IN_WORD

    def _complete(self, end: int) -> None:
        value = self._open.pop()
        text = self._text_since(value.piece, value.start, end)
        self._events.append(ValueEvent("completed", value.pointer, value.kind, text))
        self._state = _NAME if self._open and self._open[-1].kind == "object" else _VALUE

    def _text_since(self, piece: int, start: int, end: int) -> str:
        """The text from there up to character ``end`` of the last piece."""
        if piece == len(self._pieces) - 1:
            return self._pieces[-1][start:end]
        between = self._pieces[piece + 1 : -1]
        return "".join((self._pieces[piece][start:], *between, self._pieces[-1][:end]))


class AnswerValues:
    """The events of one answer: of its content if that is JSON, and of the arguments of its tool
    calls."""

    def __init__(self, request: GenerateRequest, *, validated: bool) -> None:
        """
        Args:
            validated: the constraint is enforced completely.
        """
        constraint = request.constraint
        self._is_on = request.stream_values
        self._validated = validated
        is_json = isinstance(constraint, JsonSchema | AnyJson)
        self._content = ValueTracker() if self._is_on and is_json else None
        self._calls: dict[int, ValueTracker] = {}
        if isinstance(constraint, StructuralTag):
            contents = [
                tag.content.schema if isinstance(tag.content, Parameters) else tag.content
                for tag in constraint.tags
            ]
            self._validated = all(not isinstance(c, JsonSchema) or c.strict for c in contents)

    def push(self, text: str, calls: list[ToolCall], *, is_last: bool) -> list[ValueEvent]:
        """The events of a chunk's new text and tool calls.

        Args:
            is_last: the answer is complete.
        """
        if not self._is_on:
            return []
        events: list[ValueEvent] = []
        if self._content is not None:
            events += self._content.push(text)
            events += self._content.finish() if is_last else []
        for call in calls:
            found = self._calls.setdefault(call.index, ValueTracker()).push(call.arguments)
            events += [msgspec.structs.replace(event, tool_call=call.index) for event in found]
        if not self._validated:
            events = [msgspec.structs.replace(event, validated=False) for event in events]
        return events


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of the longest match at a place; the patterns match everywhere, if only the empty
    text."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


def _unquoted(name: str) -> str:
    """A property name as a part of a JSON pointer (RFC 6901)."""
    return str(json.loads(name)).replace("~", "~0").replace("/", "~1")
