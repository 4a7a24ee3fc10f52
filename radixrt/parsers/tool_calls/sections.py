"""Tool calls in a section of their own: DeepSeek V3, R1 and V3.1, Kimi K2, Hunyuan."""

import re

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas

_SECTION = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_CALL, _BEHIND_NAME, _END = (
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
_FENCE = "```json"


class Section(ToolCallFormat):
    """A call is ``call``, its name in ``prefix`` and ``suffix``, ``middle``, its arguments,
    ``tail``, ``end``."""

    call: str
    middle: str
    end: str
    prefix = suffix = tail = ""
    names = re.compile(r"[^<>\s`:]+")

    def tag(self, tool: Tool) -> Tag:
        begin = f"{self.call}{self.prefix}{tool.name}{self.suffix}{self.middle}"
        return tool.json_tag(begin, self.tail + self.end)

    def name_of(self, written: str) -> str:
        """The name of a call.

        Raises:
            NoCallError: it is none.
        """
        name = written.strip()
        if not self.names.fullmatch(name):
            raise NoCallError
        return name

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        """Read the calls up to the end of their section."""
        (_, closing), end = self.lists[0], self.end.strip()
        yield from text.blank()
        mark = yield from text.expect(self.call)
        while mark == self.call:
            written, _ = yield from text.until(self.middle.strip())
            calls.begin(self.name_of(written))
            yield from text.blank()
            yield from text.json(calls.add)
            calls.end()
            text.record()  # what is read is not content any more
            yield from text.blank()
            if self.tail:
                yield from text.accept(self.tail.strip())
                yield from text.blank()
            yield from text.expect(end)
            yield from text.blank()
            mark = yield from text.accept(self.call, closing)


class DeepseekV31(Section):
    openings = _SECTION[:1]
    closings = (_SECTION[1], _END)
    other_marks = (_CALL, _BEHIND_NAME)
    lists = (_SECTION,)
    separator = ""
    call, middle, end = _CALL, _BEHIND_NAME, _END
    template_marks: tuple[str, ...] = (_SECTION[0],)
    foreign_marks: tuple[str, ...] = (_FENCE,)


class DeepseekV3(DeepseekV31):
    """The arguments are a block of code; ``function`` stands before the name."""

    separator = "\n"
    middle = f"\n{_FENCE}\n"
    prefix = f"function{_BEHIND_NAME}"
    tail = "\n```"
    template_marks = (_SECTION[0], _FENCE)
    foreign_marks = ()

    def name_of(self, written: str) -> str:
        return super().name_of(written.rpartition(_BEHIND_NAME)[2])


class KimiK2(Section):
    """A call's id is ``functions.NAME:INDEX``. A constrained one has the index 0."""

    openings = ("<|tool_calls_section_begin|>",)
    closings = ("<|tool_calls_section_end|>", "<|tool_call_end|>")
    other_marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")
    lists = (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),)
    separator = ""
    call, middle = other_marks
    end = "<|tool_call_end|>"
    prefix, suffix = "functions.", ":0"
    template_marks = ("<|tool_calls_section_begin|>",)

    def name_of(self, written: str) -> str:
        return super().name_of(written.strip().removeprefix("functions.").rpartition(":")[0])


class Hunyuan(Section):
    openings = ("<tool_calls>",)
    closings = ("</tool_calls>", "</tool_call>")
    other_marks = ("<tool_call>",)
    lists = (("<tool_calls>", "</tool_calls>"),)
    separator = "\n"
    call, end = "<tool_call>", "</tool_call>"
    middle = f"\n{_FENCE}\n"
    tail = "\n```"
    names = re.compile(r"[^<>\s`]+")
    template_marks = ("<tool_calls>", "function_arguments_in_json_format")
