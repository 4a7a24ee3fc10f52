"""Writes the rules of a tool call's parameters, for formats that write each parameter by itself (:mod:`...parameters`).

A parameter whose values are strings is written without quotes, up to the closing mark of its style; others are JSON. Declared
parameters stand in the order of the schema; a tool that declares none takes any.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from radixrt.constrained.constraint import Parameters, ParameterStyle
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import Unenforced
from radixrt.constrained.json_schema.auditing.audit import plan_json_schema
from radixrt.constrained.parameters import (
    Form,
    Parameter,
    any_parameter,
    declared_parameters,
    keywords_on_the_whole,
    takes_any_name,
)
from radixrt.constrained.regex_text import alternatives, with_ecma_classes


@dataclasses.dataclass(frozen=True)
class Style:
    opening: tuple[str, str]
    """Before and behind the parameter's name."""
    quotes: tuple[str, str]
    """Around a string."""
    closing: str
    """Behind a value."""
    separator: str
    stop: str
    """No string may hold this text: the parser would take it for the string's end."""
    any_name: str
    """Regular expression of a name that the schema does not declare."""


STYLES: dict[ParameterStyle, Style] = {
    "qwen_xml": Style(
        opening=("<parameter=", ">\n"),
        quotes=("", ""),
        closing="\n</parameter>\n",
        separator="",
        stop="</parameter>",
        any_name="[^<>\\n]+",
    ),
}


class ParameterRules:
    """Writes the rules of one tag.

    Args:
        prefix: of the names of all its rules.
        literal: writes a fixed text as terminals.
        options: of llguidance's converter of JSON schemas.

    Attributes:
        lines: the rules.
        named: grammars to which the rules refer by name.
        unenforced: the keywords that they leave out; only where the schema is not strict.
    """

    def __init__(
        self,
        content: Parameters,
        prefix: str,
        literal: Callable[[str], str],
        options: dict[str, Any],
    ) -> None:
        self._style = STYLES[content.style]
        self._is_strict = content.schema.strict
        self._prefix = prefix
        self._literal = literal
        self._options = options
        self.lines: list[str] = []
        self.named: list[dict[str, Any]] = []
        self.unenforced: list[Unenforced] = []
        schema = json.loads(content.schema.schema)
        for word in keywords_on_the_whole(schema):
            reason = "a format that writes each parameter by itself can't hold several to it"
            self._leave_out(word, f"/{word}", reason)
        if takes_any_name(schema):
            self.start = self._any(any_parameter(schema))
        else:
            self.start = self._declared(declared_parameters(schema))

    def _declared(self, parameters: list[Parameter]) -> str:
        """The parameters in order. ``first_i`` stands where none is written yet, ``rest_i`` behind one."""
        first, rest = (f"{self._prefix}_{word}" for word in ("first", "rest"))
        for index, parameter in enumerate(parameters):
            begin = self._literal(self._style.opening[0] + parameter.name + self._style.opening[1])
            written = f"{begin} {self._value(index, parameter)} {rest}_{index + 1}"
            for name, lead in ((first, ""), (rest, self._literal(self._style.separator))):
                ways = [] if parameter.schema is False else [f"{lead} {written}"]
                ways += [] if parameter.is_required else [f"{name}_{index + 1}"]
                self.lines.append(f"{name}_{index}: {' | '.join(ways)}")
        self.lines += [f'{name}_{len(parameters)}: ""' for name in (first, rest)]
        return f"{first}_0"

    def _any(self, parameter: Parameter) -> str:
        """Any number of parameters of any names."""
        name, (begin, end) = f"{self._prefix}_any", map(self._literal, self._style.opening)
        self.lines += [
            f"{name.upper()}: /{self._style.any_name}/",
            f"{name}_one: {begin} {name.upper()} {end} {self._value(0, parameter)}",
            f"{name}: ({name}_one ({self._literal(self._style.separator)} {name}_one)*)?",
        ]
        return name

    def _value(self, index: int, parameter: Parameter) -> str:
        """The value of a parameter, and what stands behind it."""
        if parameter.schema is False:
            if parameter.is_required:
                raise CannotCompile(f"Nothing satisfies the parameter {parameter.name!r}.")
            return ""
        schema = self._planned(parameter)
        name, style = f"{self._prefix}_{index}", self._style
        if parameter.form is Form.JSON:
            self.named.append(
                {"name": name, "json_schema": {**schema, "x-guidance": self._options}}
            )
            return f"@{name} {self._literal(style.closing)}"
        text = _text(schema)
        if text is None:
            reason = "it has no form as a regular expression without quotes"
            self._leave_out("pattern", f"/properties/{parameter.name}", reason)
            text = "ANY" if parameter.form is Form.TEXT else 'ANY | "null"'
        self.lines.append(
            f"{name.upper()}: (({text}) & ~(ANY {json.dumps(style.stop)} ANY)) {json.dumps(style.closing)}"
        )
        return name.upper()

    def _planned(self, parameter: Parameter) -> dict[str, Any]:
        """The schema of a parameter, normalised, with the keywords alone that llguidance enforces."""
        try:
            plan = plan_json_schema(
                json.dumps(parameter.schema),
                strict=self._is_strict,
                backend="llguidance",
                allow_checks=False,
            )
        except CannotEnforce as error:
            raise CannotCompile(f"In the parameter {parameter.name!r}: {error}") from error
        where = f"/properties/{parameter.name}"
        self.unenforced += [
            msgspec.structs.replace(each, pointer=where + each.pointer) for each in plan.unenforced
        ]
        if isinstance(plan.schema, dict):
            return plan.schema
        return {} if plan.schema else {"enum": []}

    def _leave_out(self, keyword: str, pointer: str, reason: str) -> None:
        if self._is_strict:
            raise CannotCompile(
                f"{keyword} at {pointer} can't be enforced: {reason}. Take it out, or set strict to false."
            )
        self.unenforced.append(Unenforced(keyword=keyword, pointer=pointer, reason=reason))


def _text(schema: dict[str, Any]) -> str | None:
    """The strings and the null of a normalised schema as a Lark expression; None: it has none."""
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return _regex(alternatives("null" if value is None else value for value in values))
    if isinstance(branches := schema.get("anyOf"), list) and len(schema) == 1:
        return _alternatives(branches)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return _alternatives([{**schema, "type": kind} for kind in kinds])
    if kinds == "null":
        return '"null"'
    if kinds != "string" or not schema.keys() <= {"type", "minLength", "maxLength", "pattern"}:
        return None
    parts = ["ANY"]
    if schema.keys() & {"minLength", "maxLength"}:
        parts = [f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"]
    if (pattern := schema.get("pattern")) is not None:
        if (whole := _whole_match(pattern)) is None:
            return None
        parts.append(_regex(whole))
    return " & ".join(parts)


def _alternatives(schemas: list[dict[str, Any]]) -> str | None:
    texts = [text for schema in schemas if (text := _text(schema)) is not None]
    return " | ".join(f"({text})" for text in texts) if len(texts) == len(schemas) else None


def _whole_match(pattern: str) -> str | None:
    """The expression that matches a whole text if the pattern of a schema matches somewhere in it; None: not found.

    The pattern may have anchors at its ends alone.
    """
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    if re.search(r"[$^]|\(\?[=!<]|\\b", plain):
        return None
    depth = 0
    for character in plain:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0 and (begins or ends):
            return None
    anything = "(?s:.*)"
    return f"{'' if begins else anything}(?:{with_ecma_classes(inner)}){'' if ends else anything}"


def _regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/(" + re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", pattern, flags=re.DOTALL) + ")/"
