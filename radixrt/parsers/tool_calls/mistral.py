"""The tool calls of Mistral: since tokenizer version 11 ``[TOOL_CALLS]NAME[ARGS]{...}`` each, before it one JSON list."""

import re

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas
from radixrt.parsers.tool_calls.json_lists import JsonList


class Mistral(ToolCallFormat):
    openings = ("[TOOL_CALLS]",)
    other_marks = ("[ARGS]", "[CALL_ID]")
    triggers = ("[TOOL_CALLS]",)
    separator = ""
    names = re.compile(r"[^\s{}\[\]]+")

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("[TOOL_CALLS]", "[ARGS]")

    def tag(self, tool: Tool) -> Tag:
        return tool.json_tag(f"[TOOL_CALLS]{tool.name}[ARGS]", "")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        """Tokenizer version 11 writes ``[CALL_ID]`` and an id between name and arguments."""
        name, mark = yield from text.until("[ARGS]", "[CALL_ID]", "{")
        if not self.names.fullmatch(name.strip()):
            raise NoCallError
        if mark == "{":
            text.give_back(mark)
        elif mark == "[CALL_ID]":
            yield from text.until("[ARGS]")
        calls.begin(name.strip())
        yield from text.blank()
        yield from text.json(calls.add)
        calls.end()


class MistralV3(JsonList):
    openings = ("[TOOL_CALLS]",)
    lists = (("[TOOL_CALLS] [", "]"), ("[TOOL_CALLS][", "]"))

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("[TOOL_CALLS]") and not marks.in_template("[ARGS]")
