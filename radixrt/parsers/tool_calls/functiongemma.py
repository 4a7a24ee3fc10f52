"""The tool calls of FunctionGemma: ``<start_function_call>call:NAME{KEY:<escape>VALUE<escape>}<end_function_call>``."""

import re

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas
from radixrt.parsers.tool_calls.literals import add_arguments


class FunctionGemma(ToolCallFormat):
    openings = ("<start_function_call>",)
    closings = ("<end_function_call>",)
    other_marks = ("<escape>",)
    triggers = ("<start_function_call>",)
    separator = ""
    names = re.compile(r"[^\s{}<>]+")

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<start_function_call>")

    def tag(self, tool: Tool) -> Tag:
        begin = f"<start_function_call>call:{tool.name}{{"
        return tool.parameters_tag(begin, "functiongemma", "}<end_function_call>")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        yield from text.expect("call:")
        name, _ = yield from text.until("{")
        if not self.names.fullmatch(name):
            raise NoCallError
        calls.begin(name)
        yield from add_arguments(text, calls, ":", "}", "<escape>")
        calls.end()
        yield from text.blank()
        yield from text.accept("<end_function_call>")
