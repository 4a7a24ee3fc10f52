"""Tool calls of a name and a JSON object: Mistral's since tokenizer version 11,
``[TOOL_CALLS]NAME[ARGS]{...}``, and Hunyuan's, with a fenced object in ``<tool_call>`` tags and all
calls in ``<tool_calls>`` tags."""

import re

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas


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


class Hunyuan(ToolCallFormat):
    openings = ("<tool_calls>",)
    closings = ("</tool_calls>", "</tool_call>")
    other_marks = ("<tool_call>",)
    separator = "\n"
    lists = (("<tool_calls>", "</tool_calls>"),)
    names = re.compile(r"[^<>\s`]+")

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<tool_calls>", "function_arguments_in_json_format")

    def tag(self, tool: Tool) -> Tag:
        return tool.json_tag(f"<tool_call>{tool.name}\n```json\n", "\n```</tool_call>")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        mark = yield from text.expect("<tool_call>")
        while mark == "<tool_call>":
            name, _ = yield from text.until("```")
            if not self.names.fullmatch(name.strip()):
                raise NoCallError
            calls.begin(name.strip())
            yield from text.accept("json")
            yield from text.blank()
            yield from text.json(calls.add)
            calls.end()
            text.record()  # what is read is not content any more
            for closing in ("```", "</tool_call>"):
                yield from text.expect(closing)
            yield from text.blank()
            mark = yield from text.accept("<tool_call>", "</tool_calls>")
