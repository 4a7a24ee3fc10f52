"""Reads text that arrives in pieces: the scanner under all parsers of tool calls.

A reading function is a generator. It yields where the next character decides and has not arrived;
the parser resumes it with the next piece. So a parser reads as if the whole text were there, and
its result does not depend on where the text was cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A reading function in progress; it returns its result."""

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE_STRING = re.compile(r'["\\]')
_BLANK = re.compile(r"\s*")
_SCALAR = re.compile(r"[-+.\w]*")


class NoCallError(Exception):
    """The text is not a tool call of the format."""


class Scanner:
    """Text that has arrived and is not read yet.

    Attributes:
        unread: the text from the place of reading on.
        is_complete: no more text comes.
    """

    def __init__(self) -> None:
        self.unread = ""
        self.is_complete = False
        self._recorded: list[str] | None = None

    @property
    def is_over(self) -> bool:
        return self.is_complete and not self.unread

    def record(self) -> None:
        """Remember what is read from here on, for :meth:`recorded`."""
        self._recorded = []

    def recorded(self) -> str:
        """The text read since :meth:`record`."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def take(self, length: int) -> str:
        text, self.unread = self.unread[:length], self.unread[length:]
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def give_back(self, text: str) -> None:
        """Make a text that was read unread again."""
        self.unread = text + self.unread
        if self._recorded is not None:
            self._recorded = ["".join(self._recorded).removesuffix(text)]

    def need(self, length: int = 1) -> Reading[bool]:
        """Wait for so many unread characters. False: the text ends before them."""
        while len(self.unread) < length:
            if self.is_complete:
                return False
            yield
        return True

    def blank(self) -> Reading[None]:
        """Skip white space."""
        while True:
            match = _BLANK.match(self.unread)
            self.take(match.end() if match else 0)
            if self.unread or not (yield from self.need()):
                return

    def accept(self, *marks: str) -> Reading[str]:
        """Take the mark that comes next; "" if none of them does."""
        open_marks = list(marks)
        while open_marks:
            for mark in open_marks:
                if self.unread.startswith(mark):
                    return self.take(len(mark))
            open_marks = [mark for mark in open_marks if mark.startswith(self.unread)]
            if open_marks and not (yield from self.need(len(self.unread) + 1)):
                break
        return ""

    def expect(self, *marks: str) -> Reading[str]:
        """Take the mark that comes next after white space.

        Raises:
            NoCallError: none of them does.
        """
        yield from self.blank()
        found = yield from self.accept(*marks)
        if not found:
            raise NoCallError
        return found

    def piece(self, *marks: str) -> Reading[tuple[str, str]]:
        """Some text before the next mark, and the mark if it stands right behind; both "" at the
        end of the text."""
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            if found := pattern.search(self.unread):
                text = self.take(found.start())
                return text, self.take(len(found[0]))
            begun = 0
            if not self.is_complete:
                begun = max((length_of_begun(mark, self.unread) for mark in marks), default=0)
            if (certain := len(self.unread) - begun) or self.is_complete:
                return self.take(certain), ""
            yield from self.need(begun + 1)

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """The text before the next mark, and the mark.

        Raises:
            NoCallError: the text ends without one.
        """
        pieces = []
        while True:
            text, mark = yield from self.piece(*marks)
            pieces.append(text)
            if mark:
                return "".join(pieces), mark
            if self.is_over:
                raise NoCallError

    def matched(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take the longest run of characters that the pattern matches; it matches every beginning
        of a run."""
        pieces = []
        while True:
            match = pattern.match(self.unread)
            pieces.append(self.take(match.end() if match else 0))
            if self.unread or not (yield from self.need()):
                return "".join(pieces)

    def json(self, into: Callable[[str], object]) -> Reading[None]:
        """Take a JSON value and pass it on piece by piece. Only its brackets and strings are
        checked.

        Raises:
            NoCallError: there is none, or the text ends within it.
        """
        yield from self.need()
        if self.unread[:1] not in ("{", "[", '"'):
            scalar = yield from self.matched(_SCALAR)
            if not scalar:
                raise NoCallError
            into(scalar)
            return
        scanner = JsonScanner()
        while (end := scanner.end(self.unread)) is None:
            into(self.take(len(self.unread)))
            if not (yield from self.need()):
                raise NoCallError
        into(self.take(end))

    def whole_json(self) -> Reading[str]:
        """The same as :meth:`json`, in one text."""
        pieces: list[str] = []
        yield from self.json(pieces.append)
        return "".join(pieces)


class JsonScanner:
    """Finds the end of a JSON object, array or string whose text comes in pieces, by counting
    brackets outside strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end(self, piece: str) -> int | None:
        """The offset in the next piece after the last character of the value; None: the value goes
        on."""
        at = 0
        if self._is_escaped and piece:
            self._is_escaped, at = False, 1
        while found := (_INSIDE_STRING if self._in_string else _OUTSIDE).search(piece, at):
            character, at = found.group(), found.end()
            if character == "\\":
                self._is_escaped = at == len(piece)
                at += 1
                continue
            if character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if self._depth == 0 and not self._in_string:
                return at
        return None


def length_of_begun(tag: str, text: str) -> int:
    """How much of the end of a text may be the beginning of a tag."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
