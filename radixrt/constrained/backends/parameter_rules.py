"""Writes the rules of a tool call's parameters, for formats that write each parameter by itself
(:mod:`...parameters`).

A parameter whose values are strings is written without quotes, up to the closing mark of its style;
others are JSON. Declared parameters stand in the order of the schema; a tool that declares none
takes any.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from radixrt.constrained.backends.lark import LarkText, alternatives, regex, with_ecma_classes
from radixrt.constrained.backends.tag_schemas import TagSchema
from radixrt.constrained.constraint import Parameters
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import SpanCheck, Unenforced
from radixrt.constrained.json_schema.keywords import pointer_of
from radixrt.constrained.parameters import (
    STYLES,
    Form,
    Parameter,
    any_parameter,
    declared_parameters,
    keywords_on_the_whole,
    takes_any_name,
)


class ParameterRules:
    """Writes the rules of one tag into a text.

    Args:
        options: those of llguidance's converter of JSON schemas.
        allow_checks: the values of parameters can be found in an answer.
        enforce: finds how the schema of a parameter is enforced.

    Attributes:
        start: name of the first rule.
        checks: checks of values that are JSON, in paths from the arguments as one object.
        checked: the keywords that they enforce.
        unenforced: the keywords that are left out; only where the schema is not strict.
    """

    def __init__(
        self,
        content: Parameters,
        text: LarkText,
        options: dict[str, Any],
        allow_checks: bool,
        enforce: Callable[..., TagSchema],
    ) -> None:
        self._text = text
        self._prefix = f"p{text.number()}"
        self._enforce = enforce
        self._style = STYLES[content.style]
        self._is_strict = content.schema.strict
        self._options = options
        self._allow_checks = allow_checks and self._is_strict
        self.checks: list[SpanCheck] = []
        self.checked: list[Unenforced] = []
        self.unenforced: list[Unenforced] = []
        schema = json.loads(content.schema.schema)
        for word in keywords_on_the_whole(schema):
            reason = "a format that writes each parameter by itself can't hold several to it"
            self._leave_out(word, pointer_of((word,)), reason)
        if takes_any_name(schema):
            self.start = self._any(any_parameter(schema))
        else:
            self.start = self._declared(declared_parameters(schema))

    def _declared(self, parameters: list[Parameter]) -> str:
        """The parameters in order. ``first_i`` stands where none was written, else ``rest_i``."""
        first, rest = (f"{self._prefix}_{word}" for word in ("first", "rest"))
        for index, parameter in enumerate(parameters):
            begin = self._text.literal(
                self._style.opening[0] + parameter.name + self._style.opening[1]
            )
            written = f"{begin} {self._value(index, parameter)} {rest}_{index + 1}"
            for name, lead in ((first, ""), (rest, self._text.literal(self._style.separator))):
                ways = [] if parameter.schema is False else [f"{lead} {written}"]
                ways += [] if parameter.is_required else [f"{name}_{index + 1}"]
                self._text.lines.append(f"{name}_{index}: {' | '.join(ways)}")
        self._text.lines += [f'{name}_{len(parameters)}: ""' for name in (first, rest)]
        return f"{first}_0"

    def _any(self, parameter: Parameter) -> str:
        """Any number of parameters of any names."""
        name, (begin, end) = f"{self._prefix}_any", map(self._text.literal, self._style.opening)
        self._text.lines += [
            f"{name.upper()}: /{self._style.names}/",
            f"{name}_one: {begin} {name.upper()} {end} {self._value(0, parameter)}",
            f"{name}: ({name}_one ({self._text.literal(self._style.separator)} {name}_one)*)?",
        ]
        return name

    def _value(self, index: int, parameter: Parameter) -> str:
        """The value of a parameter, and what stands behind it."""
        if parameter.schema is False:
            if parameter.is_required:
                raise CannotCompile(f"Nothing satisfies the parameter {parameter.name!r}.")
            return ""
        if parameter.name and not re.fullmatch(self._style.names, parameter.name):
            raise CannotCompile(
                f"The model's format of tool calls can't write the parameter {parameter.name!r}; rename it."
            )
        name, style = f"{self._prefix}_{index}", self._style
        closing = self._text.literal(style.closing)
        schema, words = _without_words(self._enforced(parameter), style.words)
        if words and any(check.path == (parameter.name,) for check in self.checks):
            raise CannotCompile(
                f"The parameter {parameter.name!r} can't be checked as a whole, since it may be {' or '.join(words)}; check a part of "
                "it, or set strict to false."
            )
        ways = [f"{self._text.literal(word)} {closing}" for word in words]
        if schema is None:
            return f"({' | '.join(ways)})"
        if parameter.form is Form.JSON or style.takes_json:
            options = {"x-guidance": self._options}
            self._text.named.append({"name": name, "json_schema": {**schema, **options}})
            ways.append(f"@{name} {closing}")
        if parameter.form is Form.JSON:
            return f"({' | '.join(ways)})"
        text = _text(schema)
        if text is None:
            reason = "it has no form as a regular expression without quotes"
            self._leave_out(
                "pattern", pointer_of(("properties", parameter.name, "pattern")), reason
            )
            text = "ANY" if parameter.form is Form.TEXT or words else 'ANY | "null"'
        text = f"({text}) & ~(ANY {style.stop} ANY)"
        end = style.quote + style.closing
        if self._text.names_control_token(end):
            self._text.lines.append(f"{name.upper()}: {text} & SOME")
            optional = "?" if _takes_empty(schema) else ""
            ways.append(
                f"{self._text.literal(style.quote)} {name.upper()}{optional} {self._text.literal(end)}"
            )
        else:
            self._text.lines.append(f"{name.upper()}: ({text}) {json.dumps(end)}")
            ways.append(f"{self._text.literal(style.quote)} {name.upper()}")
        return f"({' | '.join(ways)})"

    def _enforced(self, parameter: Parameter) -> dict[str, Any]:
        """The schema of a parameter for llguidance, with the keywords alone that it enforces."""

        def placed(pointer: str) -> str:
            if pointer.startswith(("/$defs/", "/definitions/")):
                return pointer  # these are the whole schema's
            return pointer_of(("properties", parameter.name)) + pointer

        try:
            found = self._enforce(
                json.dumps(parameter.schema),
                strict=self._is_strict,
                allow_checks=self._allow_checks
                and parameter.form is Form.JSON
                and bool(parameter.name),
            )
        except CannotEnforce as error:
            if not parameter.name:  # any parameter
                raise
            raise CannotEnforce(error.keyword, placed(error.pointer), error.reason) from error

        replace = msgspec.structs.replace
        for kept, left in ((self.unenforced, found.unenforced), (self.checked, found.checked)):
            kept += [replace(each, pointer=placed(each.pointer)) for each in left]
        self.checks += [
            replace(one, path=(parameter.name, *one.path), pointer=placed(one.pointer))
            for one in found.checks
        ]
        return found.schema

    def _leave_out(self, keyword: str, pointer: str, reason: str) -> None:
        if self._is_strict:
            raise CannotCompile(
                f"{keyword} at {pointer} can't be enforced: {reason}. Take it out, or set strict to false."
            )
        self.unenforced.append(Unenforced(keyword=keyword, pointer=pointer, reason=reason))


def _without_words(
    schema: dict[str, Any], words: Mapping[bool | None, str]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The schema without the values that are words, if any are left, and these words."""

    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        found = [
            value
            for value in values
            if (value is None or isinstance(value, bool)) and value in words
        ]
        others = [value for value in values if not any(value is word for word in found)]
        rest: dict[str, Any] | None = {"enum": others} if others else None
        return rest if found else schema, [words[value] for value in found]
    if isinstance(branches := schema.get("anyOf"), list) and schema.keys() <= {"anyOf", "$defs"}:
        parts = [_without_words(branch, words) for branch in branches if isinstance(branch, dict)]
        texts = list(dict.fromkeys(text for _, each in parts for text in each))
        if len(parts) < len(branches) or not texts:
            return schema, []
        left = [part for part, _ in parts if part is not None]
        return {**schema, "anyOf": left} if left else None, texts
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [str(kinds)]
    gone = [kind for kind in kinds if kind in _WORDS and words.keys() >= {*_WORDS[kind]}]
    if not gone:
        return schema, []
    left = [kind for kind in kinds if kind not in gone]
    return {**schema, "type": left} if left else None, [
        words[value] for kind in gone for value in _WORDS[kind]
    ]


_WORDS: dict[str, tuple[bool | None, ...]] = {"boolean": (True, False), "null": (None,)}


def _takes_empty(schema: dict[str, Any]) -> bool:
    """Whether the empty string is valid; False where it is not known."""
    if "const" in schema or "enum" in schema:
        return "" in schema.get("enum", [schema.get("const")])
    if "anyOf" in schema:
        return any(map(_takes_empty, schema["anyOf"]))
    if schema.get("minLength") or "string" not in schema.get("type", ()):
        return False
    try:
        return re.fullmatch(_whole_match(schema.get("pattern", "")) or "x", "") is not None
    except re.error:
        return False


def _text(schema: dict[str, Any]) -> str | None:
    """The strings and the null of a normalised schema as a Lark expression; None: it has none."""
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return regex(alternatives("null" if value is None else value for value in values))
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
        parts.append(regex(whole))
    return " & ".join(parts)


def _alternatives(schemas: list[dict[str, Any]]) -> str | None:
    texts = [text for schema in schemas if (text := _text(schema)) is not None]
    return " | ".join(f"({text})" for text in texts) if len(texts) == len(schemas) else None


def _whole_match(pattern: str) -> str | None:
    """The expression that matches a whole text if the pattern of a schema matches somewhere in it;
    None: not found.

    The pattern may have anchors at its ends alone.
    """
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    if re.search(r"[$^]|\(\?[=!<]", plain) or re.search(r"\\[bB1-9]", inner):
        return None
    depth = 0
    for character in plain:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0 and (begins or ends):
            return None
    anything = "(?s:.*)"
    return f"{'' if begins else anything}(?:{with_ecma_classes(inner)}){'' if ends else anything}"
