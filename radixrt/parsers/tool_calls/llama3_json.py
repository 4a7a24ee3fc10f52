"""The tool calls of Llama 3: JSON objects without tags."""

from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolSchemas
from radixrt.parsers.tool_calls.json_calls import JsonCalls


class Llama3Json(JsonCalls):
    openings = ('{"name": ',)
    triggers = ('{"name": ',)
    separator = "; "
    arguments_key = "parameters"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<|start_header_id|>", '"parameters": ')

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        text.give_back(opening)
        yield from self.read_object(text, calls)
