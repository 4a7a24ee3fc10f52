"""Splits an answer in the harmony format of gpt-oss into reasoning, content and tool calls.

An answer is a row of messages: a header, ``<|message|>``, a text, and ``<|end|>``, or the end of
the answer. The header names a channel: *analysis* is reasoning, *final* the content, *commentary* a
text to the user or, with the recipient ``to=functions.NAME``, the arguments of a call. The prompt
has the beginning of the first header: ``<|start|>assistant``.
"""

import re

from radixrt.constrained.constraint import AnyText, Format, Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.messages.message import ToolCall
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ASSISTANT = f"{START}assistant"
"""The end of the prompt, and the beginning of each further message."""
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final"
"""The header of the content, up to a type that may follow."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyParser:
    """Splits an answer's text into reasoning, content and tool calls while it is generated.

    >>> parser = HarmonyParser()
    >>> parser.push("<|channel|>analysis<|message|>Two and two<|end|><|start|>assistant<|channel|>final<|message|>4")
    ('Two and two', '4', [])

    Args:
        prompt_end: the last characters of the prompt.
        calls: messages to functions are calls; else they are content.
        in_pieces: see :class:`~radixrt.parsers.tool_calls.parser.ToolCallParser`.
        is_held: a grammar governs the answer. Its content or its call then goes on to the end of
            it; without calls, the final message alone is content.
        marks_are_given: only the marks that are added by :meth:`add_mark` are some; other texts
            only look like them.

    Attributes:
        end: length in characters of the reasoning before all other messages, with its headers;
            None: it goes on.
    """

    def __init__(
        self,
        prompt_end: str = "",
        *,
        calls: bool = False,
        in_pieces: bool = False,
        is_held: bool = False,
        marks_are_given: bool = False,
    ) -> None:
        self._takes_calls = calls
        self._is_held = is_held
        self._calls = CallSink(in_pieces=in_pieces)
        self._text = Scanner()
        self._num_pushed = 0
        self._marks: set[int] | None = None
        self.end: int | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._begun: set[str] = set()
        """Channels that have had a message."""
        self._reading = self._read()
        next(self._reading)
        self.push(prompt_end.rpartition(ASSISTANT)[2] if ASSISTANT in prompt_end else "")
        self._num_pushed = len(self._text.unread)
        self.end = None if self.end is None else 0
        self._marks = set() if marks_are_given else None

    def add_mark(self, end: int) -> None:
        """Tell where a mark ends, in characters of the answer, before its text is pushed."""
        if self._marks is not None:
            self._marks.add(end)

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str, list[ToolCall]]:
        """The reasoning, the content and the calls that are now certain.

        Args:
            is_last: the answer is complete.
        """
        self._text.unread += text
        self._num_pushed += len(text)
        self._text.is_complete = is_last
        next(self._reading, None)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return reasoning, content, self._calls.take()

    @property
    def _place(self) -> int:
        """Characters read."""
        return self._num_pushed - len(self._text.unread)

    def _read(self) -> Reading[None]:
        text = self._text
        while True:
            yield from text.need()
            if text.is_over:
                return
            begin = self._place
            header = yield from self._header()
            if header is None:
                return
            found, recipients = _CHANNEL.search(header), _RECIPIENT.findall(header)
            channel = found[1] if found else "final"
            recipient = recipients[-1] if recipients else ""
            is_call = recipient.startswith(_FUNCTIONS)
            if self._is_reasoning(channel, recipient, is_call):
                yield from self._body("analysis", to_the_end=False)
                continue
            self.end = begin if self.end is None else self.end
            if is_call and self._takes_calls:
                yield from self._call(recipient.removeprefix(_FUNCTIONS), header)
            else:
                yield from self._body("final", to_the_end=self._is_held and channel == "final")

    def _is_reasoning(self, channel: str, recipient: str, is_call: bool) -> bool:
        """Also messages to tools that no request has, those before content that a grammar governs,
        and calls that it does not."""
        if self._is_held and channel == "analysis":
            return True
        if is_call and self._takes_calls:
            return False
        if channel == "analysis" or (recipient and not is_call):
            return True
        return self._is_held and not self._takes_calls and channel != "final"

    def _header(self) -> Reading[str | None]:
        """All of a message before its text; "" where a text stands without a header, None where the
        answer ends within it."""
        text = self._text
        mark = yield from text.accept(*MARKS, " to=")
        if mark in MARKS and not self._is_mark():
            text.give_back(mark)
            mark = ""
        if mark in ("", END, CALL, RETURN):
            return ""
        pieces = [mark]
        while mark != MESSAGE:
            piece, mark = yield from text.piece(*MARKS)
            pieces += (piece, mark)
            if mark != MESSAGE and text.is_over:
                return None
        return "".join(pieces)

    def _is_mark(self) -> bool:
        """Whether the mark that has just been read is one."""
        return self._marks is None or self._place in self._marks

    def _piece(self, to_the_end: bool) -> Reading[tuple[str, str]]:
        """Some text of a message, and the mark behind it that ends it."""
        text = self._text
        if to_the_end:
            return text.take(len(text.unread)), ""
        piece, mark = yield from text.piece(*MARKS)
        if mark and not self._is_mark():
            return piece + mark, ""
        if mark in (START, CHANNEL):  # without an end
            text.give_back(mark)
        return piece, mark

    def _body(self, channel: str, *, to_the_end: bool) -> Reading[None]:
        """Pass the text of a message on. Messages of a channel are apart by a line break."""
        if channel in self._begun:
            self._add(channel, "\n")
        self._begun.add(channel)
        mark = ""
        while not mark and (yield from self._text.need()):
            piece, mark = yield from self._piece(to_the_end)
            self._add(channel, piece)

    def _add(self, channel: str, text: str) -> None:
        (self._reasoning if channel == "analysis" else self._content).append(text)

    def _call(self, name: str, header: str) -> Reading[None]:
        calls, pieces, mark = self._calls, [header], ""
        calls.begin(name)
        while not mark and (yield from self._text.need()):
            piece, mark = yield from self._piece(to_the_end=self._is_held)
            pieces.append(piece)
            calls.add(piece)
        try:
            if not calls.in_pieces and not "".join(pieces[1:]).strip():
                calls.add("{}")
            calls.end()
        except NoCallError:
            calls.drop()
            self._content += pieces


_TEXT = AnyText(excludes=MARKS)


class Harmony(ToolCallFormat):
    """With ``--reasoning-parser harmony``, :class:`~radixrt.parsers.harmony.HarmonyParser` reads
    the whole answer, and the calls in it."""

    openings = (f"{CHANNEL}commentary to=functions.",)
    closings = (CALL,)
    other_marks = MARKS
    separator = ""
    names = re.compile(r"[\w.-]+")
    before = (
        Tag(begin=ANALYSIS, content=_TEXT, end=END + ASSISTANT),
        Tag(begin=f"{CHANNEL}commentary{MESSAGE}", content=_TEXT, end=END + ASSISTANT),
    )
    num_reasoning = 1
    template_marks = (CHANNEL, CALL)

    def tag(self, tool: Tool) -> Tag:
        return tool.json_tag(f"{self.openings[0]}{tool.name} {CONSTRAIN}json{MESSAGE}", "")

    def content(self, content: Format) -> Tag:
        return Tag(begin=FINAL + MESSAGE, content=content, end="")

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        header, _ = yield from text.until(MESSAGE)
        name = header.partition(CONSTRAIN)[0].split()
        if not name or not self.names.fullmatch(name[0]):
            raise NoCallError
        calls.begin(name[0])
        yield from text.blank()
        yield from text.json(calls.add)
        calls.end()
        yield from text.accept(CALL)
