"""Builds the constraint of an answer that may call tools, in the syntax of the model's tool-call format."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.constrained import requests
from radixrt.constrained.constraint import AnyJson, JsonSchema, StructuralTag, Tag


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    arguments: JsonSchema

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


class CallSyntax(ABC):
    """How a model writes tool calls, as far as a constraint needs to know."""

    trigger: str
    """Where free text writes this, a call must follow."""
    separator: str
    """Between calls."""
    is_told_from_json = True
    """No JSON begins as a call does."""

    @abstractmethod
    def tag(self, tool: Tool) -> Tag:
        """A call of the tool."""


def calls(
    tools: Iterable[Tool], written: CallSyntax, *, required: bool, most: int | None
) -> StructuralTag:
    """Text in which each tool call is one of the given tools' and has arguments of its schema.

    Args:
        required: the answer is calls alone, at least one; False: text, and calls where the model makes some.
        most: most calls; None: any number.
    """
    return StructuralTag(
        tags=tuple(map(written.tag, tools)),
        triggers=(written.trigger,),
        free_text=not required,
        separator=written.separator if required else "",
        min_tags=int(required),
        max_tags=most,
    )


def one_call_or_json(
    tools: Iterable[Tool], written: CallSyntax, content: JsonSchema | AnyJson
) -> StructuralTag:
    """Either one call of a tool or JSON, and nothing else.

    Args:
        written: a form that no JSON begins with.
    """
    held = calls(tools, written, required=True, most=1)
    return msgspec.structs.replace(held, tags=(*held.tags, Tag(begin="", content=content, end="")))
