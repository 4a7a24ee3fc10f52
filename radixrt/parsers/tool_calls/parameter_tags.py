"""The tool calls of Qwen3-Coder, Seed-OSS, MiniMax M2 and GLM-4.5: tags around each parameter.

    <tool_call>
    <function=NAME>
    <parameter=PARAMETER>
    VALUE
    </parameter>
    </function>
    </tool_call>

Strings stand as they are, without quotes; other values as JSON. The schema of the tool tells which
is which.
"""

import json
import re
from typing import Any

from radixrt.constrained.constraint import ParameterStyle, Tag
from radixrt.constrained.parameters import STYLES, Form, any_parameter, declared_parameters
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas, as_json
from radixrt.parsers.tool_calls.pythonic import literal


class ParameterTags(ToolCallFormat):
    """A call is ``begin``, with the name of the function in its middle, parameters in the
    ``style``, and ``end``.

    White space between the marks is free where no grammar holds the answer.
    """

    separator = "\n"
    names = re.compile(r"[^<>\s]+")
    style: ParameterStyle
    begin: tuple[str, str]
    """The text of a call before and behind its name."""
    end: str
    name_opening: str
    """The part of ``begin`` that stands right before the name, behind the opening; "": none."""
    name_ends: tuple[str, ...]
    """A name ends before one of them."""
    value_marks: tuple[str, ...]
    """Between the name of a parameter and its value."""
    wrapper_end = ""
    """The text behind a call, or behind all calls of a list."""

    def tag(self, tool: Tool) -> Tag:
        return tool.parameters_tag(tool.name.join(self.begin), self.style, self.end)

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        if self.name_opening and mark != self.name_opening:
            yield from text.expect(self.name_opening)
        yield from self._read_call(text, calls, tools)
        while self.wrapper_end:
            text.record()  # what is read is not content any more
            yield from text.blank()
            next_call = (self.name_opening,) if self.lists else ()
            if (yield from text.accept(self.wrapper_end, *next_call)) not in next_call:
                return
            yield from self._read_call(text, calls, tools)

    def _read_call(self, text: Scanner, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        """Read a call from its name on."""
        name, mark = yield from text.until(*self.name_ends)
        name = name.strip()
        if not self.names.fullmatch(name):
            raise NoCallError
        if mark.startswith("<"):  # it is the next mark
            text.give_back(mark)
        begin, end = STYLES[self.style].opening[0], self.end.partition("\n")[0]
        forms = {one.name: one.form for one in declared_parameters(tools.get(name))}
        other = any_parameter(tools.get(name)).form
        calls.begin(name)
        before = "{"
        while (yield from text.expect(begin, end)) == begin:
            parameter, _ = yield from text.until(self.value_marks[0])
            for mark in self.value_marks[1:]:
                yield from text.expect(mark)
            calls.add(f"{before}{as_json(parameter)}: ")
            yield from self._read_value(text, calls, forms.get(parameter, other))
            before = ", "
        calls.add("{}" if before == "{" else "}")
        calls.end()

    def _read_value(self, text: Scanner, calls: CallSink, form: Form) -> Reading[None]:
        """Read a value and its closing tag. Where the style has a line break around values, the one
        before the closing tag and the one behind the opening tag belong to the tags."""
        closing = STYLES[self.style].closing.rstrip()
        closings = (closing, closing.lstrip())
        if closing.startswith("\n"):
            yield from text.accept("\n")
        if form is not Form.TEXT:
            written, _ = yield from text.until(*closings)
            calls.add(as_json(_value(written, form)))
            return
        calls.add('"')
        mark = ""
        while not mark:
            piece, mark = yield from text.piece(*closings)
            if not mark and text.is_over:
                raise NoCallError
            calls.add(as_json(piece)[1:-1])
        calls.add('"')


class Qwen3Coder(ParameterTags):
    openings = ("<tool_call>", "<function=")
    closings = ("</tool_call>", "</function>", "</parameter>")
    triggers = ("<tool_call>", "<function=")
    style: ParameterStyle = "qwen_xml"
    begin = ("<tool_call>\n<function=", ">\n")
    end = "</function>\n</tool_call>"
    name_opening = "<function="
    name_ends = (">",)
    value_marks = (">",)
    wrapper_end = "</tool_call>"
    template_marks = ("<tool_call>", "<function=", "<parameter=")

    def tags_in_text(self, tool: Tool) -> tuple[Tag, ...]:
        """Qwen3-Coder often leaves the opening tag out."""
        begin = f"<function={tool.name}>\n"
        return self.tag(tool), tool.parameters_tag(begin, "qwen_xml", "</function>")


class SeedOss(ParameterTags):
    openings = triggers = ("<seed:tool_call>",)
    closings = ("</seed:tool_call>", "</function>", "</parameter>")
    style: ParameterStyle = "seed_xml"
    begin = ("<seed:tool_call>\n<function=", ">\n")
    end = "</function>\n</seed:tool_call>"
    name_opening = "<function="
    name_ends = (">",)
    value_marks = (">",)
    wrapper_end = "</seed:tool_call>"
    template_marks = ("<seed:tool_call>",)


class MinimaxM2(ParameterTags):
    """All calls stand between one pair of tags."""

    openings = ("<minimax:tool_call>",)
    closings = ("</minimax:tool_call>",)
    separator = ""
    lists = (("<minimax:tool_call>\n", "</minimax:tool_call>"),)
    names = re.compile(r"[^<>\s\"]+")
    style: ParameterStyle = "minimax_xml"
    begin = ('<invoke name="', '">\n')
    end = "</invoke>\n"
    name_opening = '<invoke name="'
    name_ends = ('">',)
    value_marks = ('">',)
    wrapper_end = "</minimax:tool_call>"
    template_marks = ("<minimax:tool_call>", "<invoke name=")


class Glm45(ParameterTags):
    """GLM-4.5 and 4.6: ``<tool_call>NAME``, a line for each key and each value."""

    openings = triggers = ("<tool_call>",)
    closings = ("</tool_call>",)
    other_marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    style: ParameterStyle = "glm45"
    begin = ("<tool_call>", "\n")
    end = "</tool_call>"
    name_opening = ""
    name_ends = ("<arg_key>", "</tool_call>")
    value_marks = ("</arg_key>", "<arg_value>")
    template_marks = ("<arg_key>",)
    foreign_marks: tuple[str, ...] = ("}<arg_key>",)


class Glm47(Glm45):
    """The same without line breaks."""

    separator = ""
    style: ParameterStyle = "glm47"
    begin = ("<tool_call>", "")
    template_marks = ("}<arg_key>",)
    foreign_marks = ()


_WORDS = {"True": True, "False": False, "None": None}
"""Templates that write values as Python teach them to the model."""


def _value(written: str, form: Form) -> Any:
    if form is Form.NULLABLE_TEXT:
        return None if written == "null" else written
    word = written.strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return _python_value(written) if word[:1] in ("[", "{") else written


def _python_value(written: str) -> Any:
    """A list or an object as Python writes it; the text itself if it is none."""
    text = Scanner()
    text.unread, text.is_complete = written.strip(), True
    try:
        next(literal(text))
    except StopIteration as read:
        if text.is_over:
            return read.value
    except NoCallError:
        pass
    return written
