"""Tool calls that are a list of Python calls: those of Llama 3.2 and 4, ``[f(a=1), g(b="x")]``,
which is the whole answer, and in tags those of LFM2 and OLMo 3."""

import re

from radixrt.constrained.constraint import ParameterStyle, Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas
from radixrt.parsers.tool_calls.json_calls import Granite
from radixrt.parsers.tool_calls.literals import add_arguments

_NAME = re.compile(r"[^\s\[\](){},'\"=]*")


class Pythonic(ToolCallFormat):
    openings = ("[",)
    begins_answer = True
    separator = ", "
    lists = (("[", "]"),)
    not_text = r"""[ \t\r\n]*\[[^\[\](){},'"= \t\r\n]+\("""
    names = re.compile(r"[^\s\[\](){},'\"=]+")
    style: ParameterStyle = "pythonic"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("func_name1(") or marks.in_template("[func_name(")

    def tag(self, tool: Tool) -> Tag:
        return tool.parameters_tag(f"{tool.name}(", self.style, ")")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        yield from self._read_calls(text, calls, self.lists[0][1])

    def _read_calls(self, text: Scanner, calls: CallSink, closing: str) -> Reading[None]:
        """Read the calls up to the end of their list."""
        comma = self.separator.strip()
        while True:
            yield from text.blank()
            name = yield from text.matched(_NAME)
            if not name or not (yield from text.accept("(")):
                raise NoCallError
            calls.begin(name)
            yield from add_arguments(text, calls, "=", ")")
            calls.end()
            text.record()  # what is read is not content any more
            yield from text.blank()
            if (yield from text.accept(closing)):
                return
            if comma:
                yield from text.expect(comma)


class Lfm2(Pythonic):
    """The list in tags. Where a system prompt asks for JSON, it is a list of objects."""

    openings = ("<|tool_call_start|>",)
    closings = ("<|tool_call_end|>",)
    begins_answer = False
    lists = (("<|tool_call_start|>[", "]<|tool_call_end|>"),)
    not_text = ""
    _in_json = Granite()

    def recognises(self, marks: ModelMarks) -> bool:
        """Templates of LFM2 and small LFM2.5 show the list of tools alone."""
        mark = self.openings[0]
        named = marks.in_template(mark) or marks.in_template("<|tool_list_start|>")
        return named or (marks.in_template("List of tools: ") and mark in marks.tokens)

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        yield from text.expect("[")
        yield from text.blank()
        if (yield from text.accept("{")):
            text.give_back("{")
            yield from self._in_json.read_list(text, calls)
        else:
            yield from self._read_calls(text, calls, "]")
        yield from text.blank()
        yield from text.accept(*self.closings)


class Olmo3(Pythonic):
    """Calls on lines of their own, between tags; values as in JSON."""

    openings = ("<function_calls>",)
    closings = ("</function_calls>",)
    begins_answer = False
    separator = "\n"
    lists = (("<function_calls>", "</function_calls>"),)
    not_text = ""
    style = "olmo3"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<function_calls>", "<functions>")
