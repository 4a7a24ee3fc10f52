"""Tool calls that are JSON objects with a name and arguments: the base of several formats."""

import json

from radixrt.constrained.constraint import Tag
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat


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
            text.record()  # what is read is no content any more
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
