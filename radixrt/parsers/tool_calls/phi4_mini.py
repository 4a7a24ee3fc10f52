"""The tool calls of Phi-4-mini: a JSON list in ``<|tool_call|>`` tags, or behind ``functools``."""

from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolSchemas
from radixrt.parsers.tool_calls.json_calls import JsonCalls


class Phi4Mini(JsonCalls):
    openings = ("<|tool_call|>", "functools[")
    closings = ("<|/tool_call|>",)
    separator = ", "
    lists = (("<|tool_call|>[", "]<|/tool_call|>"), ("functools[", "]"))

    def recognises(self, marks: ModelMarks) -> bool:
        named = any(map(marks.in_template, ("functools", "<|tool_call|>")))
        return marks.in_template("<|tool|>") and (named or "<|tool_call|>" in marks.tokens)

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        """A template of llama.cpp shows the model one object in the tags, without the list."""
        yield from text.blank()
        if opening == "functools[" or (yield from text.accept("[")):
            yield from self.read_list(text, calls)
        else:
            yield from self.read_object(text, calls)
        yield from text.blank()
        yield from text.accept("<|/tool_call|>")
