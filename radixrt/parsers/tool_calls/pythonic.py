"""The tool calls of Llama 3.2 and 4: a list of Python calls, ``[f(a=1), g(b="x")]``, which is the whole answer."""

import re

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas
from radixrt.parsers.tool_calls.literals import add_arguments

_NAME = re.compile(r"[^\s\[\](){},'\"=]*")


class Pythonic(ToolCallFormat):
    openings = ("[",)
    begins_answer = True
    separator = ", "
    lists = (("[", "]"),)
    not_text = r"""[ \t\r\n]*\[[^\[\](){},'"= \t\r\n]+\("""
    names = re.compile(r"[^\s\[\](){},'\"=]+")

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("func_name1(") or marks.in_template("[func_name(")

    def tag(self, tool: Tool) -> Tag:
        return tool.parameters_tag(f"{tool.name}(", "pythonic", ")")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        mark = ","
        while mark == ",":
            yield from text.blank()
            name = yield from text.matched(_NAME)
            if not name or not (yield from text.accept("(")):
                raise NoCallError
            calls.begin(name)
            yield from add_arguments(text, calls, "=", ")")
            calls.end()
            text.record()  # what is read is no content any more
            mark = yield from text.expect(",", "]")
