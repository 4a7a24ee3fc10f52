"""The tool calls of Hermes, Qwen 2.5, Qwen 3, Granite 4 and SmolLM3, and of EXAONE 4: a JSON object in ``<tool_call>`` tags."""

from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolSchemas
from radixrt.parsers.tool_calls.json_calls import JsonCalls

_EXAONE = "[|endofturn|]"


class Hermes(JsonCalls):
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    triggers = ("<tool_call>",)
    separator = "\n"
    head = "<tool_call>\n"
    tail = "\n</tool_call>"

    def recognises(self, marks: ModelMarks) -> bool:
        others = ("<function=", "<arg_key>", "<tool_calls>", _EXAONE)
        return marks.in_template("<tool_call>") and not any(map(marks.in_template, others))

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        yield from self.read_object(text, calls)
        yield from text.blank()
        yield from text.accept("</tool_call>")


class Exaone4(Hermes):
    head = "<tool_call>"
    tail = "</tool_call>"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<tool_call>", _EXAONE)
