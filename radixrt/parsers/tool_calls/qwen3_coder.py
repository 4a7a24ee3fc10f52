"""The tool calls of Qwen3-Coder, Qwen 3.5 and Qwen 3.6: a tag for each parameter.

    <tool_call>
    <function=NAME>
    <parameter=PARAMETER>
    VALUE
    </parameter>
    </function>
    </tool_call>

Strings stand as they are, without quotes; other values as JSON. The schema of the tool tells which is which.
"""

import json
import re
from typing import Any

from radixrt.constrained.constraint import Tag
from radixrt.constrained.parameters import Form, any_parameter, declared_parameters
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas, as_json

_WORDS = {"True": True, "False": False, "None": None}
"""Templates that write values as Python teach them to the model."""


class Qwen3Coder(ToolCallFormat):
    openings = ("<tool_call>", "<function=")
    closings = ("</tool_call>", "</function>", "</parameter>")
    triggers = ("<tool_call>", "<function=")
    separator = "\n"
    names = re.compile(r"[^<>\s]+")

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<tool_call>", "<function=", "<parameter=")

    def tag(self, tool: Tool) -> Tag:
        begin, end = f"<tool_call>\n<function={tool.name}>\n", "</function>\n</tool_call>"
        return tool.parameters_tag(begin, "qwen_xml", end)

    def tags_in_text(self, tool: Tool) -> tuple[Tag, ...]:
        """Qwen3-Coder often leaves the opening tag out."""
        begin = f"<function={tool.name}>\n"
        return self.tag(tool), tool.parameters_tag(begin, "qwen_xml", "</function>")

    def read(
        self, text: Scanner, opening: str, calls: CallSink, tools: ToolSchemas
    ) -> Reading[None]:
        if opening != "<function=":
            yield from text.expect("<function=")
        name, _ = yield from text.until(">")
        forms = {one.name: one.form for one in declared_parameters(tools.get(name))}
        other = any_parameter(tools.get(name)).form
        calls.begin(name)
        before = "{"
        while (yield from text.expect("<parameter=", "</function>")) == "<parameter=":
            parameter, _ = yield from text.until(">")
            calls.add(f"{before}{as_json(parameter)}: ")
            yield from _read_value(text, calls, forms.get(parameter, other))
            before = ", "
        calls.add("{}" if before == "{" else "}")
        calls.end()
        yield from text.blank()
        yield from text.accept("</tool_call>")


def _read_value(text: Scanner, calls: CallSink, form: Form) -> Reading[None]:
    """Read a value and its closing tag. One line break after the opening tag and one before the closing tag belong to the tags."""
    yield from text.accept("\n")
    closings = ("\n</parameter>", "</parameter>")
    if form is not Form.TEXT:
        written, _ = yield from text.until(*closings)
        calls.add(as_json(_value(written, form)))
        return
    calls.add('"')
    closing = ""
    while not closing:
        piece, closing = yield from text.piece(*closings)
        if not closing and text.is_over:
            raise NoCallError
        calls.add(as_json(piece)[1:-1])
    calls.add('"')


def _value(written: str, form: Form) -> Any:
    if form is Form.NULLABLE_TEXT:
        return None if written == "null" else written
    word = written.strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
