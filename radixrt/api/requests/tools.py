"""Reads the tools of a request: ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

Custom tools of OpenAI's API take a text: a free one, or one of a grammar. The model sees a function
with one string, ``input``, since chat templates know functions alone. It writes the text as a JSON
string, which the grammar holds in that form; the client gets the text itself.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import orjson

from radixrt.api.http.middleware import new_id
from radixrt.api.requests.constraint import AskedConstraint
from radixrt.api.requests.protocol import ChatCompletionRequest, PromptRequest
from radixrt.base.convert import check_depth
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.constrained import requests
from radixrt.constrained.constraint import AnyJson, Constraint, JsonSchema, Lark
from radixrt.constrained.tool_calls import CUSTOM_INPUT, CallSyntax, Tool, calls, one_call_or_json
from radixrt.messages.message import ToolCall

_NAMED_KINDS = ("function", "custom")
"""Kinds of tools that ``tool_choice`` names."""

_BEFORE_INPUT = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
_KINDS = {"lark": "text of this Lark grammar", "regex": "text that matches this regular expression"}


def offered_tools(fields: ChatCompletionRequest | PromptRequest) -> list[dict[str, Any]] | None:
    """The tools that the template shows to the model, all of them as functions.

    Raises:
        RequestError: a chat template cannot render a tool.
    """
    check_depth(fields.tools, "tools")
    offered = [_as_function(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())]
    return None if fields.tools is None or fields.tool_choice == "none" else offered


def _as_function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Templates read the function's name and description, and fail at tools that have none."""
    if tool.get("type") == "custom":
        custom = CustomTool.read(tool, where).as_function()
        mark = tool.get("cache_control")
        return custom if mark is None else {**custom, "cache_control": mark}
    if tool.get("type", "function") != "function":
        raise wrong(
            f"{where}.type",
            'must be "function" or "custom"; other kinds of tools are not supported',
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "must be an object with a name")
    if not isinstance(function.get("name"), str):
        raise wrong(f"{where}.function.name", "must be a string")
    return tool


def calls_tools(fields: ChatCompletionRequest) -> bool:
    """Whether an answer may call tools."""
    return bool(fields.tools) and fields.tool_choice != "none"


def tool_constraint(
    fields: ChatCompletionRequest, written: CallSyntax | None, asked: AskedConstraint
) -> AskedConstraint:
    """The constraint on an answer that may call tools.

    Args:
        written: how the model writes calls; None: it is not known.
        asked: the constraint on the answer's content.

    Raises:
        RequestError: ``tool_choice`` can't be met, a tool's parameters are not a schema, or calls
            can't be distinguished from constrained content.
    """
    names, must_call = _choice(fields)
    if not calls_tools(fields):
        if must_call:
            raise RequestError(
                "tool_choice asks for a call, but there are no tools.", param="tools"
            )
        return asked
    if written is None:
        raise RequestError(
            "This server does not know how its model writes tool calls, so it could not recognise one. Start it with "
            '--tool-call-parser NAME (docs/tools.md), or set tool_choice to "none".',
            param="tools",
        )
    other = asked.constraint
    tools = _tools(fields.tools or [])
    for name in names or ():
        if name not in tools:
            raise wrong("tool_choice", f"names {shown(name)}, which is not among the tools")
    allowed = tools.values() if names is None else [tools[name] for name in dict.fromkeys(names)]
    if other is not None and must_call and asked.field != "response_format":
        raise wrong(
            "tool_choice",
            "asks for a call, so the answer can't satisfy another constraint as well; leave one of them out",
        )
    if other is not None and not must_call:
        constraint = _call_or(allowed, written, other, fields.parallel_tool_calls)
        return AskedConstraint(constraint, asked.field)
    parallel = fields.parallel_tool_calls
    is_one = isinstance(fields.tool_choice, dict) and fields.tool_choice["type"] in _NAMED_KINDS
    several = parallel is True if is_one else parallel is not False
    constraint = calls(allowed, written, required=must_call, most=None if several else 1)
    return AskedConstraint(constraint, asked.field or "tools")


def _call_or(
    tools: Iterable[Tool], written: CallSyntax, other: Constraint, parallel: bool | None
) -> Constraint:
    """The constraint to either one call, or content that satisfies ``other``, as the model
    decides."""
    if not isinstance(other, JsonSchema | AnyJson) or not written.is_told_from(other):
        raise RequestError(
            'With tools and tool_choice "auto" this constraint is not supported, since its text could look like a '
            'call. Set tool_choice to "none" for an answer that satisfies the constraint, or to "required" for one '
            "that calls tools.",
            param="tool_choice",
        )
    if parallel:
        raise RequestError(
            'With tool_choice "auto" and structured output an answer makes at most one call: leave '
            "parallel_tool_calls out.",
            param="parallel_tool_calls",
        )
    return one_call_or_json(tools, written, other)


def _tools(given: list[dict[str, Any]]) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for index, tool in enumerate(given):
        kind = "custom" if tool.get("type") == "custom" else "function"
        function, where = tool[kind], f"tools[{index}].{kind}"
        name, strict = function["name"], function.get("strict")
        if not name:
            raise wrong(f"{where}.name", "is empty")
        if name in tools:
            raise RequestError(f"Two tools have the name {shown(name)}.", param=f"{where}.name")
        if kind == "custom":
            where = f"tools[{index}]"
            tools[name] = CustomTool.read(tool, where).as_tool(where)
            continue
        if not isinstance(strict, bool | None):
            raise wrong(f"{where}.strict", "must be a boolean")
        parameters = function.get("parameters")
        tools[name] = Tool.from_schema(name, parameters, strict is True, f"{where}.parameters")
    return tools


def _choice(fields: ChatCompletionRequest) -> tuple[list[str] | None, bool]:
    """The names of the tools that may be called, None: all; and whether a call is required."""
    choice = fields.tool_choice
    if choice in (None, "auto", "none"):
        return None, False
    if choice == "required":
        return None, True
    if isinstance(choice, dict):
        if (name := _tool_name(choice)) is not None:
            return [name], True
        if choice.get("type") == "allowed_tools":
            return _allowed_tools(choice.get("allowed_tools"))
    raise wrong(
        "tool_choice",
        'must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    )


def _tool_name(choice: Any) -> str | None:
    """The name in ``{"type": "function", "function": {"name": ...}}``, or the same with "custom";
    None: it has another form."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in _NAMED_KINDS:
        return None
    named = choice.get(kind)
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def _allowed_tools(allowed: Any) -> tuple[list[str], bool]:
    """OpenAI's ``{"mode": "auto" or "required", "tools": [...]}``."""
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_tool_name(tool) for tool in tools] if isinstance(tools, list) else []
    given = [name for name in names if name is not None]
    if mode not in ("auto", "required") or not given or len(given) < len(names):
        raise RequestError(
            'tool_choice.allowed_tools must have a mode, "auto" or "required", and tools, a list of '
            '{"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    return given, mode == "required"


# ---------------------------------------------------------------- custom tools


@dataclasses.dataclass(frozen=True)
class CustomTool:
    """A tool whose input is a text."""

    name: str
    description: str | None
    syntax: str
    """Syntax of the grammar: "lark" or "regex"; "": the text is free."""
    definition: str

    @staticmethod
    def read(tool: dict[str, Any], where: str) -> "CustomTool":
        """
        Args:
            tool: ``{"type": "custom", "custom": {"name": ..., "format": ...}}``.
            where: its place in the request, for errors.

        Raises:
            RequestError: it is malformed; names the place.
        """
        custom = tool.get("custom")
        if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
            raise wrong(f"{where}.custom", "must be an object with a name")
        description = custom.get("description")
        if not isinstance(description, str | None):
            raise wrong(f"{where}.custom.description", "must be a string")
        syntax, definition = _grammar(custom.get("format"), f"{where}.custom.format")
        return CustomTool(custom["name"], description, syntax, definition)

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of the function's arguments."""
        text = {"type": "string"}
        if self.syntax:
            text["description"] = f"A {_KINDS[self.syntax]}:\n{self.definition}"
        return {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }

    def as_function(self) -> dict[str, Any]:
        """The function that the model sees."""
        function = {"name": self.name, "parameters": self.parameters}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}

    def as_tool(self, where: str) -> Tool:
        """The tool with the constraint on its input.

        Raises:
            RequestError: the grammar is empty or too long.
        """
        parameters, param = self.parameters, f"{where}.custom.format.grammar.definition"
        grammar = None
        if self.syntax == "regex":
            pattern = requests.regex(self.definition, param).pattern
            parameters["properties"][CUSTOM_INPUT]["pattern"] = f"^(?:{pattern})$"
        elif self.syntax == "lark":
            asked = requests.grammar(self.definition, param)
            if not isinstance(asked, Lark):
                raise wrong(param, "must be a Lark grammar (name: ...), not EBNF")
            grammar = Lark(grammar=asked.grammar, in_json_string=True)
        arguments = Tool.from_schema(self.name, parameters, True, param).arguments
        return Tool(self.name, arguments, grammar)


def _grammar(given: Any, where: str) -> tuple[str, str]:
    """Syntax and definition."""
    if given is None or given == {"type": "text"}:
        return "", ""
    grammar = given.get("grammar") if isinstance(given, dict) else None
    if not isinstance(grammar, dict) or given.get("type") != "grammar":
        raise wrong(where, 'must be {"type": "text"} or {"type": "grammar", "grammar": {...}}')
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in tuple(_KINDS):
        raise wrong(f"{where}.grammar.syntax", f'must be "lark" or "regex", not {shown(syntax)}')
    if not isinstance(definition, str):
        raise wrong(f"{where}.grammar.definition", "must be a string")
    return str(syntax), definition


def call_of_custom(call: dict[str, Any], where: str) -> dict[str, Any]:
    """The call of the function that a custom tool's call in the history was.

    Raises:
        RequestError: it is malformed.
    """
    custom = call.get("custom")
    texts = [custom.get(name) for name in ("name", "input")] if isinstance(custom, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(f"{where}.custom", "must be an object with a name and an input, both strings")
    rest = {name: value for name, value in call.items() if name != "custom"}
    function = {"name": texts[0], "arguments": {CUSTOM_INPUT: texts[1]}}
    return {**rest, "type": "function", "function": function}


# ---------------------------------------------------------------- calls, as the client gets them


def call_as_json(call: ToolCall, id_prefix: str = "call") -> dict[str, Any]:
    """A tool call with a new id: whole, or its first piece."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id(id_prefix), "type": "function", "function": function}


def call_delta(call: ToolCall, id_prefix: str = "call") -> dict[str, Any]:
    """An element of a streamed choice's ``delta.tool_calls``."""
    if call.name:
        return {"index": call.index, **call_as_json(call, id_prefix)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


class CustomCalls:
    """Gives the calls of one answer the form that its client expects.

    Args:
        tools: of the request.
    """

    def __init__(self, tools: Iterable[dict[str, Any]] | None) -> None:
        self._names = {
            tool["custom"]["name"] for tool in tools or () if tool.get("type") == "custom"
        }
        self._is_custom = False
        self._text = ""
        """The part of the open call's arguments that is not sent yet."""
        self._is_inside = False
        """The text is inside the string."""

    def client_calls(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Args:
            calls: of functions, or pieces of them, in their order.
        """
        return [self._shown(call) for call in calls] if self._names else calls

    def _shown(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        begins = "id" in call
        if begins:
            self._is_custom, self._is_inside, self._text = (
                function["name"] in self._names,
                False,
                "",
            )
        if not self._is_custom:
            return call
        rest = {name: value for name, value in call.items() if name not in ("type", "function")}
        text = self._input(function["arguments"])
        if begins:
            return {**rest, "type": "custom", "custom": {"name": function["name"], "input": text}}
        return {**rest, "custom": {"input": text}}

    def _input(self, arguments: str) -> str:
        """The next piece of the text."""
        self._text += arguments
        if not self._is_inside:
            begun = _BEFORE_INPUT.match(self._text)
            if begun is None:
                return ""
            self._is_inside, self._text = True, self._text[begun.end() :]
        whole = _WHOLE_CHARACTERS.match(self._text)
        assert whole is not None, "it may be empty"
        self._text = self._text[whole.end() :]
        return str(orjson.loads(f'"{whole[0]}"'))
