"""Splits the tool calls off an answer's content."""

import json
import re

from radixrt.constrained.tool_calls import FORMATS, ToolCallFormat
from radixrt.messages.answers import ToolCall

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(\w+)"\s*:\s*(?=\{)')
"""Beginning of a call up to its arguments."""
_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE_STRING = re.compile(r'["\\]')


class ToolCallParser:
    """Splits an answer's text into content and tool calls while it is generated.

    Args:
        written: the model's format of calls.
        in_pieces: return a call as soon as its name is known, and then its arguments in pieces, as calls of the same
            index without a name. Only for text that a grammar constrains to calls of this format, because sent deltas
            are final. Otherwise a call is returned when it is complete, and text that only resembles a call stays
            content.
        calls_alone: an answer that does not begin with a call contains no call. Only for text that a grammar
            constrains so; a string in its JSON may resemble a call.
    """

    def __init__(
        self,
        written: ToolCallFormat = FORMATS["hermes"],
        *,
        in_pieces: bool = False,
        calls_alone: bool = False,
    ) -> None:
        self._written = written
        self._in_pieces = in_pieces
        self._calls_alone = calls_alone
        self._makes_no_call = False
        self._undecided = ""
        """Outside a call: the possible beginning of a call. Inside: the call so far, after the opening tag."""
        self._call: _OpenCall | None = None
        self._gap: str | None = None
        """Text that may separate the last call from the next one; it is content only if content follows."""
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are now certain."""
        self._undecided += text
        content, calls = "", []
        while True:
            if self._call is None:
                content += self._content(self._take_until_call())
                if self._call is None:
                    break
            if self._in_pieces:
                calls += self._pieces(self._call)
            ended = self._take_call(self._call)
            if ended is None:
                break
            rejected, call = ended
            content += self._content(rejected)
            calls += call
            self._call = None
        return content, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest of a complete answer. Models often omit the last closing tag."""
        rest, call = self._undecided, self._call
        self._undecided, self._call = "", None
        if call is None:
            return self._content(rest), []
        if call.has_begun:
            return "", []
        end = call.object_end(rest)
        known = [] if end is None or rest[end:].strip() else self._parse(rest[:end])
        return ("", known) if known else (self._content(self._written.opening + rest), [])

    def _take_until_call(self) -> str:
        """Take the text up to the next call, or up to the possible beginning of one. Opens the call."""
        trigger = self._written.trigger
        if self._calls_alone and not self._num_calls and not self._makes_no_call:
            begun = self._undecided.lstrip()[: len(trigger)]
            self._makes_no_call = not trigger.startswith(begun)
        if self._makes_no_call:
            text, self._undecided = self._undecided, ""
            return text
        before, found, after = self._undecided.partition(trigger)
        if found:
            self._call = _OpenCall()
            self._undecided = after if self._written.opening else found + after
            return before
        certain = len(before) - length_of_begun(trigger, before)
        self._undecided = before[certain:]
        return before[:certain]

    def _take_call(self, call: "_OpenCall") -> tuple[str, list[ToolCall]] | None:
        """Close the open call: return it as content or as a call; None if it has not ended."""
        text, closing = self._undecided, self._written.closing
        end = call.object_end(text)
        if end is None:
            if not call.is_no_object(text):
                return None
            close = text.find(closing)
        else:
            begun = text[end:].lstrip()
            if len(begun) < len(closing) and closing.startswith(begun):
                return None
            close = text.find(closing, end)
        if close < 0:
            return None
        self._undecided = text[close + len(closing) :]
        body = text[:close]
        if call.has_begun:
            self._num_calls += 1
            self._gap = ""
            return "", []
        if known := self._parse(body):
            return "", known
        return self._written.opening + body + closing, []

    def _pieces(self, call: "_OpenCall") -> list[ToolCall]:
        """The new deltas of the open call."""
        name = ""
        if not call.has_begun:
            head = _HEAD.match(self._undecided)
            if head is None or head.group(2) != self._written.arguments_key:
                return []
            call.sent = call.arguments_start = head.end()
            name = json.loads(head.group(1))
        end = call.arguments_end(self._undecided)
        arguments = self._undecided[call.sent : end]
        call.sent = end
        return [ToolCall(self._num_calls, name, arguments)] if name or arguments else []

    def _parse(self, text: str) -> list[ToolCall]:
        """The call, or nothing if it is none."""
        try:
            call = json.loads(text)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return []
            values = call.get(self._written.arguments_key, {})
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            (call["name"] + arguments).encode()
        except (
            ValueError,
            RecursionError,
        ):  # invalid JSON, or JSON with invalid numbers, text or depth
            return []
        self._num_calls += 1
        self._gap = ""
        return [ToolCall(index=self._num_calls - 1, name=call["name"], arguments=arguments)]

    def _content(self, text: str) -> str:
        if self._gap is None:
            return text
        self._gap += text
        separator = self._written.separator.strip()
        if separator.startswith(self._gap.strip()):
            return ""
        text, self._gap = self._gap, None
        return text


class _OpenCall:
    """A call whose end has not come yet."""

    def __init__(self) -> None:
        self._object = JsonScanner()
        self._object_end: int | None = None
        self._arguments = JsonScanner()
        self._arguments_end: int | None = None
        self.arguments_start: int | None = None
        """Where in the call's text the arguments begin, once some of it has been sent."""
        self.sent = 0
        """How far the arguments have been sent."""

    @property
    def has_begun(self) -> bool:
        """Some of it has been sent."""
        return self.arguments_start is not None

    def is_no_object(self, text: str) -> bool:
        return not text.lstrip().startswith("{") and bool(text.strip())

    def object_end(self, text: str) -> int | None:
        """Where the JSON object ends that the text begins with; None: not yet, or there is none."""
        if self._object_end is None and not self.is_no_object(text) and text.strip():
            start = len(text) - len(text.lstrip())
            end = self._object.end(text[start:])
            self._object_end = None if end is None else start + end
        return self._object_end

    def arguments_end(self, text: str) -> int:
        """The end of the text that is certain to be the call's arguments or to precede them, in characters."""
        assert self.arguments_start is not None
        if self._arguments_end is None:
            end = self._arguments.end(text[self.arguments_start :])
            if end is None:
                return len(text)
            self._arguments_end = self.arguments_start + end
        return self._arguments_end


class JsonScanner:
    """Finds the end of a JSON object whose text comes in pieces, by counting brackets outside strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._at = 0

    def end(self, text: str) -> int | None:
        """The offset after the closing bracket of the object with which ``text`` begins, once it is there.

        Args:
            text: all of it so far; later calls bring the same text, and more.
        """
        while found := (_INSIDE_STRING if self._in_string else _OUTSIDE).search(text, self._at):
            character, self._at = found.group(), found.end()
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                if self._at == len(text):  # the escaped character has not arrived
                    self._at -= 1
                    return None
                self._at += 1
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def length_of_begun(tag: str, text: str) -> int:
    """How much of the end of a text may be the beginning of a tag."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
