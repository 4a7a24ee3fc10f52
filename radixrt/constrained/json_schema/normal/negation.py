"""Writes the negation of a schema as a schema."""

from collections.abc import Callable, Iterable
from typing import Any

from radixrt.constrained.json_schema.keywords import NOT_IN, NOT_INTEGER, ORIGIN, TYPES, Schema
from radixrt.constrained.json_schema.normal.translate import Translator

MAX_NEGATED = 64
"""Keywords that one negation may turn around; larger ones are left to a check."""

_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""A type, and the bound that its values have if they break this one, so much further on."""


def type_set(value: Any) -> set[str]:
    """The types that a ``type`` names; a number may be an integer."""
    types = {value} if isinstance(value, str) else set(value)
    return types - {"integer"} if "number" in types else types


def _other_types(value: Any) -> list[Schema]:
    types = type_set(value)
    named = types | {"number"} if "integer" in types else types
    others = [kind for kind in TYPES if kind not in named]
    fractions: list[Schema] = [{"type": "number", NOT_INTEGER: True}] if "integer" in types else []
    return [{"type": others}, *fractions] if others else fractions


_OPPOSITES: dict[str, Callable[[Any], list[Schema]]] = {
    "type": _other_types,
    "const": lambda value: [{NOT_IN: [value]}],
    "enum": lambda values: [{NOT_IN: values}],
    "required": lambda names: [{"type": "object", "properties": {name: False}} for name in names],
    "not": lambda schema: [schema],
}


class Negation:
    """Turns one schema around."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._left = MAX_NEGATED

    def of(self, raw: Schema) -> Schema | None:
        """A schema of exactly the values that ``raw`` rejects; None if no schema expresses that."""
        if isinstance(raw, bool):
            return not raw
        origin = raw.get(ORIGIN, "")
        alternatives: list[Schema] = []
        for word in raw:
            if word in (ORIGIN, "then", "else", "minContains", "maxContains"):
                continue
            self._left -= 1
            ways = self._word(word, raw[word]) if self._left >= 0 else None
            if ways is None:
                return None
            for way in ways:
                if way is not False:
                    alternatives.append(way if isinstance(way, bool) else {ORIGIN: origin, **way})
        if len(alternatives) < 2:
            return alternatives[0] if alternatives else False
        return {ORIGIN: origin, "anyOf": alternatives}

    def _word(self, word: str, value: Any) -> list[Schema] | None:
        """Schemas, one of which a value must satisfy to violate this keyword."""
        if word in _OPPOSITES:
            return _OPPOSITES[word](value)
        if word in _BOUNDS:
            kind, opposite, step = _BOUNDS[word]
            return [] if step and value + step < 0 else [{"type": kind, opposite: value + step}]
        match word:
            case "additionalProperties" | "items" if value is True:
                return []
            case "uniqueItems" if value is False:
                return []
            case "$ref":
                return self._each([self._translator.at(value[1:])])
            case "allOf":
                return self._each(value)
            case "anyOf" | "oneOf" if word == "anyOf" or len(value) == 1:
                parts = self._each(value)
                return parts and [{"allOf": parts}]
            case "properties":
                parts = self._each(value.values())
                return parts and [
                    {"type": "object", "required": [name], "properties": {name: part}}
                    for name, part in zip(value, parts, strict=True)
                    if part is not False
                ]
        return None

    def _each(self, schemas: Iterable[Schema]) -> list[Schema] | None:
        """All negations; None if there is not one of each."""
        parts = []
        for schema in schemas:
            if (part := self.of(schema)) is None:
                return None
            parts.append(part)
        return parts
