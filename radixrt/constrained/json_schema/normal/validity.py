"""Tests a value against translated schemas, where jsonschema's reading of them is certain."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.checks import checkable
from radixrt.constrained.json_schema.keywords import NOT_IN, NOT_INTEGER, ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import type_set
from radixrt.constrained.json_schema.normal.matching import matches
from radixrt.constrained.json_schema.normal.translate import Translator
from radixrt.constrained.json_schema.validation import SchemaValidator
from radixrt.constrained.json_schema.walk import mapped, values_in


class RawWriter:
    """Writes translated schemas as plain 2020-12, every target of a reference under ``$defs``."""

    def __init__(self, translator: Translator, prefix: str) -> None:
        self._translator = translator
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self.defs: dict[str, Any] = {}

    def write(self, raw: Any) -> Any:
        """The schema in plain keywords; the targets of its references are added to :attr:`defs`."""
        if isinstance(raw, bool):
            return raw
        plain = mapped(raw, lambda _, child: self.write(child))
        if "$ref" in plain:
            plain["$ref"] = "#/$defs/" + self._name(raw["$ref"][1:])
        denials = []
        if NOT_IN in plain:
            denials.append({"not": {"enum": plain.pop(NOT_IN)}})
        if plain.pop(NOT_INTEGER, False):
            denials.append({"not": {"type": "integer"}})
        if denials:
            plain["allOf"] = [*plain.get("allOf", ()), *denials]
        return plain

    def _name(self, pointer: str) -> str:
        if pointer not in self._names:
            name = self._names[pointer] = f"{self._prefix}{len(self._names)}"
            self.defs[name] = None  # a place, in the order of first use
            self.defs[name] = self.write(self._translator.translated(pointer))
        return self._names[pointer]


_OF_TEXTS = {"enum", "const", NOT_IN, "type", ORIGIN}
"""Keywords that :func:`_is_listed` decides for a text."""


class Judge:
    """Finds the values of a finite set that satisfy a conjunction."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def sort(self, values: list[Any], conjuncts: list[Schema]) -> tuple[list[Any], bool]:
        """Which values satisfy all conjuncts, and whether that is certain.

        Where it is not, because of a pattern or format, the values are those that may.
        """
        for raw in conjuncts:
            values = [value for value in values if _is_listed(raw, value)]
        are_texts = all(isinstance(value, str) for value in values)
        decided = _OF_TEXTS if are_texts else {ORIGIN}
        conjuncts = [raw for raw in conjuncts if not isinstance(raw, bool) and raw.keys() - decided]
        if not conjuncts or not values:
            return values, True
        writer = RawWriter(self._translator, "r")
        schema: Any = {"allOf": [writer.write(raw) for raw in conjuncts], "$defs": writer.defs}
        try:
            validator = SchemaValidator(checkable(schema))
        except CannotEnforce:
            return values, False
        if _has_inner_format(schema) or any(
            matches(pattern, text) is None for pattern, text in _pairs(schema, values)
        ):
            return values, False
        return [v for v in values if validator.first_error(json.dumps(v)) is None], True


def _is_listed(raw: Schema, value: Any) -> bool:
    """False if a schema does not list a text among its values. Other values are listed by all:
    their equality is harder."""
    if isinstance(raw, bool) or not isinstance(value, str):
        return raw is not False
    return (
        value in raw.get("enum", (value,))
        and raw.get("const", value) == value
        and value not in raw.get(NOT_IN, ())
        and "string" in type_set(raw.get("type", "string"))
    )


def _has_inner_format(schema: Any) -> bool:
    """Whether a ``format`` stands deeper than the conjuncts: the expressions of some formats are
    narrower than the formats, and would be wider under a ``not``."""
    return any(
        isinstance(each, dict)
        and "format" in each
        and not any(each is top for top in schema["allOf"])
        for each in values_in(schema)
    )


def _pairs(schema: Any, values: list[Any]) -> Iterator[tuple[str, str]]:
    """Every pattern with every text that it may meet, at least the empty one."""
    objects = [each for each in values_in(schema) if isinstance(each, dict)]
    patterns = {each["pattern"] for each in objects if isinstance(each.get("pattern"), str)}
    patterns |= {pattern for each in objects for pattern in each.get("patternProperties", ())}
    texts = [""]
    for value in values_in(values) if patterns else ():
        if isinstance(value, str | dict):
            texts += [value] if isinstance(value, str) else value
    return itertools.product(patterns, texts)
