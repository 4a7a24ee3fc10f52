"""Tool calls whose values are literals: lists of Python calls (Llama 3.2 and 4, where
``[f(a=1), g(b="x")]`` is the whole answer, and in tags LFM2 and OLMo 3), and ``call:NAME{KEY:VALUE,...}`` between
marks (FunctionGemma, Gemma 4)."""

import ast
import json
import re
from typing import Any

from radixrt.constrained.constraint import ParameterStyle, Tag
from radixrt.constrained.parameters import STYLES
from radixrt.constrained.tool_calls import Tool
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas, as_json
from radixrt.parsers.tool_calls.json_calls import Granite

MAX_DEPTH = 100
"""Lists and objects within one another."""

_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_SCALAR = re.compile(r"[^\s,:()\[\]{}'\"<=]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}


def literal(text: Scanner, mark: str = "", depth: int = 0) -> Reading[Any]:
    """The value that comes next, behind white space.

    Args:
        mark: stands before and behind strings, where no quote does; "": there is none.

    Raises:
        NoCallError: there is none, or it nests too deep.
    """
    if depth > MAX_DEPTH:
        raise NoCallError
    yield from text.blank()
    if mark and (yield from text.accept(mark)):
        string, _ = yield from text.until(mark)
        return string
    opening = yield from text.accept("'", '"', "[", "(", "{")
    if opening in ("'", '"'):
        return (yield from _quoted(text, opening))
    if opening == "{":
        return (yield from _object(text, mark, depth))
    if opening:
        return (yield from _list(text, mark, depth, {"[": "]", "(": ")"}[opening]))
    written = yield from text.matched(_SCALAR)
    if written in _WORDS:
        return _WORDS[written]
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise NoCallError from error


def _quoted(text: Scanner, quote: str) -> Reading[str]:
    """A Python or JSON string behind its opening quote."""
    pieces = []
    while True:
        pieces.append((yield from text.matched(_PLAIN[quote])))
        if not (yield from text.need()):
            raise NoCallError
        if text.unread.startswith(quote):
            text.take(1)
            break
        if not (yield from text.need(2)):  # a backslash, and the character behind it
            raise NoCallError
        pieces.append(text.take(2))
    written = "".join(pieces)
    try:
        if quote == '"':
            return str(json.loads(f'"{written}"', strict=False))
        raise ValueError
    except ValueError:
        return _python_string(written, quote)


def _python_string(written: str, quote: str) -> str:
    breaks = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
    source = "".join(breaks.get(character, character) for character in written)
    try:
        return str(ast.literal_eval(quote + source + quote))
    except (ValueError, SyntaxError) as error:
        raise NoCallError from error


def _list(text: Scanner, mark: str, depth: int, closing: str) -> Reading[list[Any]]:
    values: list[Any] = []
    while True:
        yield from text.blank()
        if (yield from text.accept(closing)):
            return values
        values.append((yield from literal(text, mark, depth + 1)))
        if (yield from text.expect(",", closing)) == closing:
            return values


def _object(text: Scanner, mark: str, depth: int) -> Reading[dict[str, Any]]:
    values: dict[str, Any] = {}
    while True:
        yield from text.blank()
        if (yield from text.accept("}")):
            return values
        yield from text.need()
        if text.unread[:1] in ("'", '"') or (mark and mark.startswith(text.unread[:1])):
            name = yield from literal(text, mark, depth + 1)
        else:
            name = (yield from text.matched(_SCALAR)) or None
        if not isinstance(name, str):
            raise NoCallError
        yield from text.expect(":")
        values[name] = yield from literal(text, mark, depth + 1)
        if (yield from text.expect(",", "}")) == "}":
            return values


def add_arguments(
    text: Scanner, calls: CallSink, sign: str, closing: str, mark: str = ""
) -> Reading[None]:
    """Read named values behind one another, each ``NAME``, ``sign``, value, up to the closing mark,
    as the arguments of a call.

    Raises:
        NoCallError: there are none.
    """
    before = "{"
    yield from text.blank()
    behind = yield from text.accept(closing)
    while behind != closing:
        yield from text.blank()
        name = yield from text.matched(_SCALAR)
        if not name:
            raise NoCallError
        yield from text.expect(sign)
        value = yield from literal(text, mark)
        calls.add(f"{before}{as_json(name)}: {as_json(value)}")
        before = ", "
        behind = yield from text.expect(",", closing)
    calls.add("{}" if before == "{" else "}")


_NAME = re.compile(r"[^\s\[\](){},'\"=]*")


class Pythonic(ToolCallFormat):
    openings = ("[",)
    begins_answer = True
    separator = ", "
    lists = (("[", "]"),)
    not_text = r"""[ \t\r\n]*\[[^\[\](){},'"= \t\r\n]+\("""
    names = re.compile(r"[^\s\[\](){},'\"=]+")
    style: ParameterStyle = "pythonic"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("func_name1(") or marks.in_template("[func_name(")

    def tag(self, tool: Tool) -> Tag:
        return tool.parameters_tag(f"{tool.name}(", self.style, ")")

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        yield from self._read_calls(text, calls, self.lists[0][1])

    def _read_calls(self, text: Scanner, calls: CallSink, closing: str) -> Reading[None]:
        """Read the calls up to the end of their list."""
        comma = self.separator.strip()
        while True:
            yield from text.blank()
            name = yield from text.matched(_NAME)
            if not name or not (yield from text.accept("(")):
                raise NoCallError
            calls.begin(name)
            yield from add_arguments(text, calls, "=", ")")
            calls.end()
            text.record()  # what is read is not content any more
            yield from text.blank()
            if (yield from text.accept(closing)):
                return
            if comma:
                yield from text.expect(comma)


class Lfm2(Pythonic):
    """The list in tags. Where a system prompt asks for JSON, it is a list of objects."""

    openings = ("<|tool_call_start|>",)
    closings = ("<|tool_call_end|>",)
    begins_answer = False
    lists = (("<|tool_call_start|>[", "]<|tool_call_end|>"),)
    not_text = ""
    _in_json = Granite()

    def recognises(self, marks: ModelMarks) -> bool:
        """Templates of LFM2 and small LFM2.5 show the list of tools alone."""
        mark = self.openings[0]
        named = marks.in_template(mark) or marks.in_template("<|tool_list_start|>")
        return named or (marks.in_template("List of tools: ") and mark in marks.tokens)

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        yield from text.expect("[")
        yield from text.blank()
        if (yield from text.accept("{")):
            text.give_back("{")
            yield from self._in_json.read_list(text, calls)
        else:
            yield from self._read_calls(text, calls, "]")
        yield from text.blank()
        yield from text.accept(*self.closings)


class Olmo3(Pythonic):
    """Calls on lines of their own, between tags; values as in JSON."""

    openings = ("<function_calls>",)
    closings = ("</function_calls>",)
    begins_answer = False
    separator = "\n"
    lists = (("<function_calls>", "</function_calls>"),)
    not_text = ""
    style = "olmo3"

    def recognises(self, marks: ModelMarks) -> bool:
        return marks.in_template("<function_calls>", "<functions>")


class FunctionGemma(ToolCallFormat):
    """``<start_function_call>call:NAME{KEY:<escape>STRING<escape>}<end_function_call>``"""

    openings = ("<start_function_call>",)
    closings = ("<end_function_call>",)
    other_marks = ("<escape>",)
    triggers = template_marks = openings
    separator = ""
    names = re.compile(r"[^\s{}<>]+")
    style: ParameterStyle = "functiongemma"

    def tag(self, tool: Tool) -> Tag:
        begin = f"{self.openings[0]}call:{tool.name}{{"
        return tool.parameters_tag(begin, self.style, "}" + self.closings[0])

    def read(self, text: Scanner, mark: str, calls: CallSink, tools: ToolSchemas) -> Reading[None]:
        yield from text.expect("call:")
        name, _ = yield from text.until("{")
        if not self.names.fullmatch(name):
            raise NoCallError
        calls.begin(name)
        yield from add_arguments(text, calls, ":", "}", STYLES[self.style].quote)
        calls.end()
        yield from text.blank()
        yield from text.accept(*self.closings)


class Gemma4(FunctionGemma):
    """``<|tool_call>call:NAME{KEY:<|"|>STRING<|"|>}<tool_call|>``"""

    openings = ("<|tool_call>",)
    closings = ("<tool_call|>",)
    other_marks = ('<|"|>',)
    triggers = template_marks = openings
    style = "gemma4"
