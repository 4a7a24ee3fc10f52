"""The tool calls of Granite 3 and Phi-4-mini: one JSON list of objects behind a mark."""

from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolSchemas
from radixrt.parsers.tool_calls.json_calls import JsonCalls


class JsonList(JsonCalls):
    """All calls are one JSON list. An opening has the bracket of the list, or stands before it."""

    separator = ", "

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        """Some templates show the model one object behind the mark, without the list."""
        yield from text.blank()
        if opening.endswith("[") or (yield from text.accept("[")):
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

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<|start_of_role|>", "<|tool_call|>")
