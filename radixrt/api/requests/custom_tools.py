"""Custom tools of OpenAI's API, whose input is a text: a free one, or one of a grammar.

The model sees a function with one string, ``input``, since chat templates know functions alone. It writes the text as a JSON string,
which the grammar holds in that form; the client gets the text itself.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import orjson

from radixrt.base.errors import shown
from radixrt.constrained import requests
from radixrt.constrained.constraint import Lark
from radixrt.constrained.fields import wrong
from radixrt.constrained.tool_calls import CUSTOM_INPUT, Tool

_BEFORE_INPUT = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
_KINDS = {"lark": "text of this Lark grammar", "regex": "text that matches this regular expression"}


@dataclasses.dataclass(frozen=True)
class CustomTool:
    """A tool whose input is a text."""

    name: str
    description: str | None
    syntax: str
    """Of the grammar: "lark" or "regex"; "": the text is free."""
    definition: str

    @staticmethod
    def of(tool: dict[str, Any], where: str) -> "CustomTool":
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
        """Of the open call's arguments: what is not sent yet."""
        self._is_inside = False
        """The text is inside the string."""

    def of(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
