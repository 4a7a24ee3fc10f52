"""Reads the tools of a request: ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""

from collections.abc import Iterable
from typing import Any

from radixrt.api.http.middleware import new_id
from radixrt.api.requests.constraint import AskedConstraint
from radixrt.api.requests.custom_tools import CustomTool
from radixrt.api.requests.protocol import ChatCompletionRequest, PromptRequest
from radixrt.base.errors import RequestError, shown
from radixrt.base.nesting import check_depth
from radixrt.constrained.constraint import AnyJson, Constraint, JsonSchema
from radixrt.constrained.tool_calls import CallSyntax, Tool, calls, one_call_or_json
from radixrt.messages.message import ToolCall

_NAMED_KINDS = ("function", "custom")
"""Of tools."""


def offered_tools(fields: ChatCompletionRequest | PromptRequest) -> list[dict[str, Any]] | None:
    """The tools that the template shows to the model.

    Raises:
        RequestError: a chat template cannot render a tool.
    """
    tools = fields.tools or []
    check_tools(tools)
    if fields.tool_choice == "none":
        return None
    return fields.tools and [_as_function(tool, index) for index, tool in enumerate(tools)]


def _as_function(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "custom":
        return tool
    function = CustomTool.of(tool, f"tools[{index}]").as_function()
    mark = tool.get("cache_control")
    return function if mark is None else {**function, "cache_control": mark}


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
        RequestError: ``tool_choice`` can't be met, a tool's parameters are no schema, or calls can't be distinguished
            from constrained content.
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
            raise RequestError(
                f"tool_choice names {shown(name)}, which is not among the tools.",
                param="tool_choice",
            )
    allowed = tools.values() if names is None else [tools[name] for name in dict.fromkeys(names)]
    if other is not None and must_call and asked.field != "response_format":
        raise RequestError(
            "tool_choice asks for a call, so the answer can't satisfy another constraint as well; leave one of them out.",
            param="tool_choice",
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
    """The constraint to either one call, or content that satisfies ``other``, as the model decides."""
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


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Templates read the function's name and description, and fail at tools that have none.

    Raises:
        RequestError: a chat template cannot render a tool.
    """
    check_depth(tools, "tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        function = tool.get("function")
        if tool.get("type") == "custom":
            CustomTool.of(tool, f"tools[{index}]")
            continue
        if tool.get("type", "function") != "function":
            raise RequestError(
                f'tools[{index}].type must be "function" or "custom"; other kinds of tools are not supported.',
                param=f"tools[{index}].type",
            )
        if not isinstance(function, dict):
            raise RequestError(f"{where} must be an object with a name.", param=where)
        if not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.name must be a string.", param=f"{where}.name")


def call_as_json(call: ToolCall, id_prefix: str = "call") -> dict[str, Any]:
    """A tool call with a new id: whole, or its first piece."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id(id_prefix), "type": "function", "function": function}


def call_delta(call: ToolCall, id_prefix: str = "call") -> dict[str, Any]:
    """An element of a streamed choice's ``delta.tool_calls``."""
    if call.name:
        return {"index": call.index, **call_as_json(call, id_prefix)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _tools(given: list[dict[str, Any]]) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for index, tool in enumerate(given):
        kind = "custom" if tool.get("type") == "custom" else "function"
        function, where = tool[kind], f"tools[{index}].{kind}"
        name, strict = function["name"], function.get("strict")
        if not name:
            raise RequestError(f"{where}.name is empty.", param=f"{where}.name")
        if name in tools:
            raise RequestError(f"Two tools have the name {shown(name)}.", param=f"{where}.name")
        if kind == "custom":
            where = f"tools[{index}]"
            tools[name] = CustomTool.of(tool, where).as_tool(where)
            continue
        if not isinstance(strict, bool | None):
            raise RequestError(f"{where}.strict must be a boolean.", param=f"{where}.strict")
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
    raise RequestError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.',
        param="tool_choice",
    )


def _tool_name(choice: Any) -> str | None:
    """The name in ``{"type": "function", "function": {"name": ...}}``, or the same with "custom"; None: it has another form."""
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
