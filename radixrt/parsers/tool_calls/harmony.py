"""The tool calls of gpt-oss: messages to ``functions.NAME`` in the harmony format."""

import re

from radixrt.constrained.constraint import AnyText, Format, Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.harmony import (  # fmt: skip
    ANALYSIS,
    ASSISTANT,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    MARKS,
    MESSAGE,
)
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas

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

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template(CHANNEL, CALL)

    def tag(self, tool: Tool) -> Tag:
        return tool.json_tag(f"{self.openings[0]}{tool.name} {CONSTRAIN}json{MESSAGE}", "")

    def content(self, content: Format) -> Tag:
        return Tag(begin=FINAL + MESSAGE, content=content, end="")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        header, _ = yield from text.until(MESSAGE)
        name = header.partition(CONSTRAIN)[0].split()
        if not name or not self.names.fullmatch(name[0]):
            raise NoCallError
        calls.begin(name[0])
        yield from text.blank()
        yield from text.json(calls.add)
        calls.end()
        yield from text.accept(CALL)
