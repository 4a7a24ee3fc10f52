"""Tool calls that are JSON objects with a name and arguments: each in tags (Hermes, Qwen 2.5, Qwen
3, Granite 4, SmolLM3, EXAONE 4), without tags (Llama 3), or in one list behind a mark (Granite 3,
Phi-4-mini, Mistral before tokenizer version 11, Nemotron 2, Falcon-H1)."""

import json
import re

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas

_EXAONE = "[|endofturn|]"
_FALCON = ("<tool_call>\\n[", "<tool_call>\n[")


class JsonCalls(ToolCallFormat):
    """A call is ``head``, ``{"name": NAME, "<arguments_key>": ARGUMENTS}``, ``tail``."""

    head = ""
    tail = ""
    arguments_key = "arguments"

    def begin(self, name: str) -> str:
        """All of a call before its arguments."""
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{self.head}{{"name": {quoted}, "{self.arguments_key}": '

    @property
    def end(self) -> str:
        """All of a call after its arguments."""
        return "}" + self.tail

    def tag(self, tool: Tool) -> Tag:
        return tool.json_tag(self.begin(tool.name), self.end)

    def read_list(self, text: Scanner, calls: CallSink) -> Reading[None]:
        """Read the calls of a JSON list, behind its opening bracket.

        Raises:
            NoCallError: there is none, or the list ends within a call.
        """
        mark = ","
        while mark == ",":
            yield from self.read_object(text, calls)
            text.record()  # what is read is not content any more
            mark = yield from text.expect(",", "]")

    def read_object(self, text: Scanner, calls: CallSink) -> Reading[None]:
        """Read the object of a call.

        Raises:
            NoCallError: there is none.
        """
        yield from text.blank()
        if calls.in_pieces:
            yield from self._read_in_pieces(text, calls)
            return
        try:
            call = json.loads((yield from text.whole_json()))
        except (ValueError, RecursionError) as error:
            raise NoCallError from error
        if not isinstance(call, dict):
            raise NoCallError
        calls.call(call.get("name"), call.get(self.arguments_key, {}))

    def _read_in_pieces(self, text: Scanner, calls: CallSink) -> Reading[None]:
        for mark in ("{", '"name"', ":"):
            yield from text.expect(mark)
        yield from text.blank()
        name = json.loads((yield from text.whole_json()))
        for mark in (",", f'"{self.arguments_key}"', ":"):
            yield from text.expect(mark)
        yield from text.blank()
        calls.begin(name)
        yield from text.json(calls.add)
        yield from text.expect("}")
        calls.end()


class Hermes(JsonCalls):
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    triggers = ("<tool_call>",)
    separator = "\n"
    head = "<tool_call>\n"
    tail = "\n</tool_call>"
    template_marks: tuple[str, ...] = ("<tool_call>",)
    foreign_marks: tuple[str, ...] = ("<function=", "<arg_key>", "<tool_calls>", _EXAONE, *_FALCON)

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        yield from self.read_object(text, calls)
        yield from text.blank()
        yield from text.accept("</tool_call>")


class Exaone4(Hermes):
    head = "<tool_call>"
    tail = "</tool_call>"
    template_marks = ("<tool_call>", _EXAONE)
    foreign_marks = ()


class Llama3Json(JsonCalls):
    openings = ('{"name": ',)
    triggers = ('{"name": ',)
    separator = "; "
    arguments_key = "parameters"
    template_marks = ("<|start_header_id|>", '"parameters": ')

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        text.give_back(mark)
        yield from self.read_object(text, calls)


class JsonList(JsonCalls):
    """All calls are one JSON list. An opening has the bracket of the list, or stands before it."""

    separator = ", "

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        """Some templates show the model one object behind the mark, without the list."""
        yield from text.blank()
        if mark.endswith("[") or (yield from text.accept("[")):
            yield from self.read_list(text, calls)
        else:
            yield from self.read_object(text, calls)
        if self.closings:
            yield from text.blank()
            yield from text.accept(*self.closings)


class Phi4Mini(JsonList):
    openings = ("<|tool_call|>", "functools[")
    closings = ("<|/tool_call|>",)
    lists = (("<|tool_call|>[", "]<|/tool_call|>"), ("functools[", "]"))

    def recognises(self, marks: ModelMarks) -> bool:
        named = any(map(marks.in_template, ("functools", "<|tool_call|>")))
        return marks.in_template("<|tool|>") and (named or "<|tool_call|>" in marks.tokens)


class Granite(JsonList):
    """Granite 3.1 writes ``<tool_call>`` in letters, though its template says ``<|tool_call|>``."""

    openings = ("<|tool_call|>", "<tool_call>")
    lists = (("<|tool_call|>[", "]"), ("<tool_call>[", "]"))
    template_marks = ("<|start_of_role|>", "<|tool_call|>")


class NemotronJson(JsonList):
    openings = ("<TOOLCALL>",)
    closings = ("</TOOLCALL>",)
    lists = (("<TOOLCALL>[", "]</TOOLCALL>"),)
    template_marks = ("<TOOLCALL>",)


class Falcon(JsonList):
    """Falcon 3 and Falcon-H1: Hermes' tags around one list."""

    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    separator = ",\n"
    lists = (("<tool_call>\n[\n", "\n]\n</tool_call>"),)

    def recognises(self, marks: ModelMarks) -> bool:
        return any(map(marks.in_template, _FALCON))


class MistralV3(JsonList):
    openings = ("[TOOL_CALLS]",)
    lists = (("[TOOL_CALLS] [", "]"), ("[TOOL_CALLS][", "]"))
    template_marks = ("[TOOL_CALLS]",)
    foreign_marks = ("[ARGS]",)


class Mistral(ToolCallFormat):
    openings = ("[TOOL_CALLS]",)
    other_marks = ("[ARGS]", "[CALL_ID]")
    triggers = ("[TOOL_CALLS]",)
    separator = ""
    names = re.compile(r"[^\s{}\[\]]+")
    template_marks = ("[TOOL_CALLS]", "[ARGS]")

    def tag(self, tool: Tool) -> Tag:
        return tool.json_tag(f"[TOOL_CALLS]{tool.name}[ARGS]", "")

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
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
