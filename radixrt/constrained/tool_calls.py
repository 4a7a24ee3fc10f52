"""The formats in which models write tool calls. Both the constraint for calls and the parser use this table."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.constrained import requests
from radixrt.constrained.constraint import AnyJson, JsonSchema, Lark, StructuralTag, Tag

CUSTOM_INPUT = "input"
"""The only argument of a custom tool, as the model sees it: a string."""


@dataclasses.dataclass(frozen=True)
class ToolCallFormat:
    """A call is ``opening``, ``gap``, ``{"name": NAME, "<arguments_key>": ARGUMENTS}``, ``gap``, ``closing``."""

    opening: str
    gap: str
    arguments_key: str
    closing: str
    separator: str
    """Between calls."""

    @property
    def trigger(self) -> str:
        """Where free text writes this, a call must follow."""
        return self.opening or '{"name": '

    def begin(self, name: str) -> str:
        """All of a call before its arguments."""
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{self.opening}{self.gap}{{"name": {quoted}, "{self.arguments_key}": '

    @property
    def end(self) -> str:
        """All of a call after its arguments."""
        return f"}}{self.gap}{self.closing}"


FORMATS: dict[str, ToolCallFormat] = {
    "hermes": ToolCallFormat(
        opening="<tool_call>",
        gap="\n",
        arguments_key="arguments",
        closing="</tool_call>",
        separator="\n",
    ),
    "llama3_json": ToolCallFormat(
        opening="", gap="", arguments_key="parameters", closing="", separator="; "
    ),
}
"""By the name that ``--tool-call-parser`` gives them."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    arguments: JsonSchema
    grammar: Lark | None = None
    """Of a custom tool's input, the string that is the only argument; None: ``arguments`` says all."""

    @staticmethod
    def of(name: str, parameters: Any, strict: bool, param: str) -> "Tool":
        """
        Args:
            parameters: JSON schema of the arguments; None: there are none.

        Raises:
            RequestError: the parameters are no JSON schema of an object.
        """
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise RequestError(f'{param} must be a JSON schema of type "object".', param=param)
        return Tool(name, requests.json_schema({"type": "object"} | parameters, param, strict))

    def tag(self, written: ToolCallFormat) -> Tag:
        """A call of the tool."""
        begin, end = written.begin(self.name), written.end
        if self.grammar is None:
            return Tag(begin=begin, content=self.arguments, end=end)
        return Tag(begin=f'{begin}{{"{CUSTOM_INPUT}": "', content=self.grammar, end=f'"}}{end}')


def calls(
    tools: Iterable[Tool], written: ToolCallFormat, *, required: bool, most: int | None
) -> StructuralTag:
    """Text in which each tool call is one of the given tools' and has arguments of its schema.

    Args:
        required: the answer is calls alone, at least one; False: text, and calls where the model makes some.
        most: most calls; None: any number.
    """
    return StructuralTag(
        tags=tuple(tool.tag(written) for tool in tools),
        triggers=(written.trigger,),
        free_text=not required,
        separator=written.separator if required else "",
        min_tags=int(required),
        max_tags=most,
    )


def one_call_or_json(
    tools: Iterable[Tool], written: ToolCallFormat, content: JsonSchema | AnyJson
) -> StructuralTag:
    """Either one call of a tool or JSON, and nothing else.

    Args:
        written: a form with an opening tag, which no JSON begins with.
    """
    held = calls(tools, written, required=True, most=1)
    return msgspec.structs.replace(held, tags=(*held.tags, Tag(begin="", content=content, end="")))
