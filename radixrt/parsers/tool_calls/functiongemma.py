"""The tool calls of FunctionGemma and Gemma 4: ``call:NAME{KEY:VALUE,...}`` between the marks of
the model, strings between marks too."""

import re

from radixrt.constrained.constraint import ParameterStyle, Tag
from radixrt.constrained.parameters import STYLES
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas
from radixrt.parsers.tool_calls.literals import add_arguments


class FunctionGemma(ToolCallFormat):
    """``<start_function_call>call:NAME{KEY:<escape>STRING<escape>}<end_function_call>``"""

    openings = ("<start_function_call>",)
    closings = ("<end_function_call>",)
    other_marks = ("<escape>",)
    triggers = openings
    separator = ""
    names = re.compile(r"[^\s{}<>]+")
    style: ParameterStyle = "functiongemma"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template(*self.openings)

    def tag(self, tool: Tool) -> Tag:
        begin = f"{self.openings[0]}call:{tool.name}{{"
        return tool.parameters_tag(begin, self.style, "}" + self.closings[0])

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        yield from text.expect("call:")
        name, _ = yield from text.until("{")
        if not self.names.fullmatch(name):
            raise NoCallError
        calls.begin(name)
        yield from add_arguments(text, calls, ":", "}", STYLES[self.style].quote)
        calls.end()
        yield from text.blank()
        yield from text.accept(*self.closings)


class Gemma4(FunctionGemma):
    """``<|tool_call>call:NAME{KEY:<|"|>STRING<|"|>}<tool_call|>``"""

    openings = ("<|tool_call>",)
    closings = ("<tool_call|>",)
    other_marks = ('<|"|>',)
    triggers = openings
    style = "gemma4"
