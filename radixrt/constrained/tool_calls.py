"""Builds the constraint of an answer that may call tools, in the model's tool-call format."""

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from radixrt.base.errors import RequestError, shown, wrong
from radixrt.constrained import requests
from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Format,
    JsonSchema,
    Lark,
    Parameters,
    ParameterStyle,
    StructuralTag,
    Tag,
)
from radixrt.constrained.parameters import STYLES

CUSTOM_INPUT = "input"
"""The only argument of a custom tool, as the model sees it: a string."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    arguments: JsonSchema
    grammar: Lark | None = None
    """The grammar of a custom tool's input, the string that is the only argument; None:
    ``arguments`` says all."""

    @staticmethod
    def from_schema(name: str, parameters: Any, strict: bool, param: str) -> "Tool":
        """A tool from the JSON schema of its parameters; None: there are none. Raises RequestError
        if they are no JSON schema of an object."""
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise wrong(param, 'must be a JSON schema of type "object"')
        return Tool(name, requests.json_schema({"type": "object"} | parameters, param, strict))

    def json_tag(self, begin: str, end: str) -> Tag:
        """A call whose arguments are a JSON object.

        Args:
            begin: all of the call before its arguments.
            end: all of it behind them.
        """
        if self.grammar is None:
            return Tag(begin=begin, content=self.arguments, end=end, tool=self.name)
        opening = f'{begin}{{"{CUSTOM_INPUT}": "'
        return Tag(begin=opening, content=self.grammar, end=f'"}}{end}', tool=self.name)

    def parameters_tag(self, begin: str, style: ParameterStyle, end: str) -> Tag:
        """A call each of whose parameters is written by itself; the arguments are as of
        :meth:`json_tag`."""
        if self.grammar is None:
            content = Parameters(schema=self.arguments, style=style)
            return Tag(begin=begin, content=content, end=end, tool=self.name)
        how = STYLES[style]
        quote = '"' if how.takes_json else how.quote
        return Tag(
            begin=begin + CUSTOM_INPUT.join(how.opening) + quote,
            content=msgspec.structs.replace(self.grammar, in_json_string=how.takes_json),
            end=quote + how.closing + end,
            tool=self.name,
        )


class CallSyntax(ABC):
    """How a model writes tool calls, as far as a constraint needs to know."""

    openings: tuple[str, ...]
    """Each begins a call, or a list of calls."""
    triggers: tuple[str, ...] = ()
    """Where free text writes one of these, a call must follow. Not used with ``lists``."""
    separator: str
    """The text between calls."""
    lists: tuple[tuple[str, str], ...] = ()
    """All calls of an answer stand together, behind one of these openings and before its closing.
    Without: each by itself."""
    not_text = ""
    """Lists stand at the beginning of an answer alone; a text that begins as this regular
    expression says is one."""
    names: re.Pattern[str] | None = None
    """The names of functions that can be written; None: all."""
    before: tuple[Tag, ...] = ()
    """Not empty: an answer is a row of messages, of which the last is a call or the content, and
    these may stand before it: first those of the reasoning, then texts to the user."""
    num_reasoning = 0
    """How many of ``before`` are of the reasoning."""

    @abstractmethod
    def tag(self, tool: Tool) -> Tag:
        """A call of the tool."""

    def content(self, content: Format) -> Tag:
        """Content in the place of a call."""
        return Tag(begin="", content=content, end="")

    def is_told_from(self, content: JsonSchema | AnyJson) -> bool:
        """Whether no JSON of a content begins as a call does."""
        return not any(begins_json(opening, content) for opening in self.openings)

    def tags_in_text(self, tool: Tool) -> tuple[Tag, ...]:
        """The ways in which models call the tool in free text; each begins with a trigger."""
        return (self.tag(tool),)


def first_characters(content: JsonSchema | AnyJson) -> str:
    """The characters with which JSON of a content may begin."""
    schema = json.loads(content.schema) if isinstance(content, JsonSchema) else {}
    kind = None
    if isinstance(schema, dict) and "$ref" not in schema:  # some drafts ignore what is beside it
        kind = schema.get("type")
    if isinstance(content, AnyJson) and content.object_only:
        kind = "object"
    return {"object": "{", "array": "[", "string": '"'}.get(str(kind), '{["-0123456789tfn')


def begins_json(text: str, content: JsonSchema | AnyJson) -> bool:
    """Whether JSON of a content may begin as a text does."""
    first, rest = text[:1], text[1:].lstrip(" \t\r\n")
    if first not in first_characters(content):
        return False
    if first == "[":
        return rest[:1] == "]" or begins_json(rest, AnyJson(object_only=False))
    words = [word for word in ("true", "false", "null") if word[0] == first]
    return all(word.startswith(text) or text.startswith(word) for word in words)


def calls(
    tools: Iterable[Tool], written: CallSyntax, *, required: bool, most: int | None
) -> StructuralTag:
    """Text in which each tool call is one of the given tools' and has arguments of its schema.

    Args:
        written: how the model writes calls.
        required: the answer is calls alone, at least one; False: text, and calls where the model
            makes some.
        most: most calls; None: any number.

    Raises:
        RequestError: the format can't write the name of a tool.
    """
    tags: list[Tag] = []
    for tool in tools:
        if written.names is not None and not written.names.fullmatch(tool.name):
            raise RequestError(
                f"The model's format of tool calls can't write the function name {shown(tool.name)}; use letters, digits, "
                "_ and - in it.",
                param="tools",
            )
        tags += [written.tag(tool)] if required else written.tags_in_text(tool)
    if written.before:
        if not required:
            tags.append(written.content(AnyText()))
        return _messages(tags, written.before)
    return StructuralTag(
        tags=tuple(tags),
        triggers=written.triggers,
        lists=written.lists,
        not_text=written.not_text,
        free_text=not required,
        separator=written.separator if required or written.lists else "",
        min_tags=int(required),
        max_tags=most,
    )


def one_call_or_json(
    tools: Iterable[Tool], written: CallSyntax, content: JsonSchema | AnyJson
) -> StructuralTag:
    """Either one call of a tool or JSON, and nothing else.

    Args:
        written: a form with which no JSON of the content begins.
    """
    held = calls(tools, written, required=True, most=1)
    if written.before:
        tags = [*held.tags, written.content(content)]
        return _messages(tags, written.before[: written.num_reasoning])
    return msgspec.structs.replace(held, tags=(*held.tags, written.content(content)))


def _messages(tags: Iterable[Tag], before: tuple[Tag, ...]) -> StructuralTag:
    return StructuralTag(
        tags=tuple(tags), triggers=(), free_text=False, min_tags=1, max_tags=1, before=before
    )
