"""Turns Python functions into tools, and checks the calls that the model makes."""

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixrt.lang.errors import AnswerError, ProgramError
from radixrt.lang.expressions import Message, Text
from radixrt.lang.tracing.records import ToolNotes
from radixrt.lang.typed import closed, convert, parameter_types, schema_of


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model, with arguments of the function's types."""

    name: str
    arguments: dict[str, Any]
    id: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    notes: ToolNotes = field(default=nullcontext, repr=False, compare=False)
    """Records the run of the tool in the program's trace."""

    def run(self) -> Any:
        """Call the function and return its result."""
        with self.notes(self.name):
            return self.function(**self.arguments)


@dataclass(frozen=True)
class ToolAnswer:
    """The value of a gen with tools."""

    text: str
    """The text beside the calls."""
    calls: list[ToolCall]
    value: Any = None
    """The answer as the type that was asked for, by default the text. None if there are calls."""


def tool(call: ToolCall, result: Any) -> Message:
    """The message with the result of a tool call, for the model.

    Args:
        call: the call.
        result: a text, sent as it is, or a value that becomes JSON as ``json.dumps`` writes it.

    Raises:
        ProgramError: the result cannot be written as JSON.

    >>> tool(ToolCall("get_fee", {}, "1", print), {"fee": 42}).parts
    (Text(text='{"fee": 42}'),)
    """
    content = result if isinstance(result, str) else _as_json(result)
    return Message("tool", (Text(content),), (("tool_call_id", call.id), ("name", call.name)))


def _as_json(result: Any) -> str:
    """Raises ProgramError if the result cannot be written as JSON."""
    try:
        plain = msgspec.to_builtins(result, str_keys=True, enc_hook=_plain_model)
        return json.dumps(plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ProgramError(
            f"The tool's result cannot be sent to the model: {error}. Return a text or a value that JSON can represent."
        ) from error


def _plain_model(value: Any) -> Any:
    """A pydantic model as plain data; msgspec converts the rest."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no JSON")


def as_tools(functions: Sequence[Callable[..., Any]]) -> tuple[dict[str, Any], ...]:
    """Functions as tools in OpenAI's form.

    Raises:
        ProgramError: two have the same name, or one has no name or no schema.
    """
    for function in functions:
        if not hasattr(function, "__name__"):
            raise ProgramError(
                f"{function!r} can't be a tool, since it has no name; write a function that calls it."
            )
    names = [function.__name__ for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise ProgramError(f"Two tools are called {name}; rename one.")
    return tuple(
        {
            "type": "function",
            "function": {
                "name": function.__name__,
                "description": inspect.getdoc(function) or "",
                "parameters": _parameters(function),
            },
        }
        for function in functions
    )


def read_calls(
    raw_calls: Sequence[dict[str, Any]],
    functions: Sequence[Callable[..., Any]],
    notes: ToolNotes = nullcontext,
) -> list[ToolCall]:
    """The calls of an answer, with checked and converted arguments.

    Args:
        raw_calls: in OpenAI's form.

    Raises:
        AnswerError: a call names an unknown tool, or its arguments do not fit the function's types.
    """
    by_name = {function.__name__: function for function in functions}
    return [_read_call(raw, by_name, notes) for raw in raw_calls]


def _read_call(
    raw: dict[str, Any], by_name: dict[str, Callable[..., Any]], notes: ToolNotes
) -> ToolCall:
    name, text = raw["function"]["name"], raw["function"]["arguments"]
    function = by_name.get(name)
    if function is None:
        raise AnswerError(
            f"The model called {name!r}, which is none of the tools {', '.join(by_name)}.", text
        )
    try:
        given = msgspec.json.decode(text or "{}", type=dict[str, Any])
        hints = parameter_types(function)
        arguments = {key: convert(hints.get(key, Any), value) for key, value in given.items()}
        inspect.signature(function).bind(**arguments)
    except (ValueError, TypeError) as error:
        raise AnswerError(
            f"The model called {name} with arguments that do not fit its signature: {error}. They were {text[:200]}.",
            text,
        ) from error
    return ToolCall(name, arguments, raw["id"], function, notes)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    hints = parameter_types(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    definitions: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ProgramError(
                f"{function.__name__} can't be a tool, since its parameter {name} has no name of its own to be called by; "
                "write a function with plain parameters."
            )
        schema = schema_of(hints.get(name, Any))
        definitions |= schema.pop("$defs", {})
        properties[name] = schema
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    if definitions:
        parameters["$defs"] = definitions
    result: dict[str, Any] = closed(parameters)
    return result
