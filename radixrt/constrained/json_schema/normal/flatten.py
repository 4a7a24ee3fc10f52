"""Flattens a conjunction of schemas: opens references and ``allOf``, and writes negations."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from radixrt.constrained.json_schema.keywords import (
    ANY_TYPE,
    NOT_IN,
    NOT_INTEGER,
    ORIGIN,
    TYPE_OF,
    TYPES,
    Schema,
    distinct,
)
from radixrt.constrained.json_schema.normal.document import Translator

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

    def negated(self, raw: Schema) -> Schema | None:
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
                return self._each([self._translator.translated(value[1:])])
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
            if (part := self.negated(schema)) is None:
                return None
            parts.append(part)
        return parts


MAX_OPENED = 1000
"""Schemas of one value that are searched for evaluated properties and items."""

Raw = dict[str, Any]
"""A translated schema that is not a boolean."""


@dataclasses.dataclass
class Flat:
    """All of these hold for the value, unless ``never``."""

    simple: list[Raw] = dataclasses.field(default_factory=list)
    """Schemas whose keywords are about the value itself, and open no other schema for it."""
    choices: list[list[Schema]] = dataclasses.field(default_factory=list)
    """Lists of which at least one schema each holds."""
    exclusives: list[list[Schema]] = dataclasses.field(default_factory=list)
    """Lists of which exactly one schema each holds."""
    opaque: list[Raw] = dataclasses.field(default_factory=list)
    """Schemas that the other forms can't express."""
    never: bool = False

    def conjuncts(self) -> list[Schema]:
        """The same, as schemas."""
        anyof: list[Schema] = [{"anyOf": branches} for branches in self.choices]
        oneof: list[Schema] = [{"oneOf": branches} for branches in self.exclusives]
        return [False] if self.never else [*self.simple, *anyof, *oneof, *self.opaque]

    def types(self) -> set[str]:
        """The types that the value may have; ``integer`` for ``number`` if it must be one."""
        allowed = set(TYPES)
        for raw in self.simple:
            if "type" in raw:
                allowed = _common_types(allowed, type_set(raw["type"]))
        return allowed

    def values(self) -> list[Any] | None:
        """The values of the shortest ``enum`` or ``const``; None without one."""
        lists: list[list[Any]] = [raw["enum"] for raw in self.simple if "enum" in raw]
        lists += [[raw["const"]] for raw in self.simple if "const" in raw]
        shortest = min(lists, key=len, default=None)
        return None if shortest is None else distinct(shortest)


def count_bounds(simple: list[Raw], what: str) -> tuple[int, int | None]:
    """The highest ``minItems`` and the lowest ``maxItems``, or those of ``Properties`` or
    ``Length``."""
    low, high = f"min{what}", f"max{what}"
    least = max((int(raw.get(low, 0)) for raw in simple), default=0)
    return least, min((int(raw[high]) for raw in simple if high in raw), default=None)


def _common_types(one: set[str], other: set[str]) -> set[str]:
    common = one & other
    if ("integer" in one and "number" in other) or ("integer" in other and "number" in one):
        common.add("integer")
    return common


class Flattener:
    """Opens schemas. Schemas are never copied deeply, and never changed."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._parts: dict[int, tuple[Schema, Flat]] = {}
        """The flat form of each schema, by its identity: most are met in many conjunctions."""

    def flatten(self, conjuncts: list[Schema]) -> Flat:
        flat = Flat()
        for raw in conjuncts:
            if id(raw) not in self._parts:
                self._parts[id(raw)] = raw, Flat()
                self._add(self._parts[id(raw)][1], raw)
            part = self._parts[id(raw)][1]
            flat.simple += part.simple
            flat.choices += part.choices
            flat.exclusives += part.exclusives
            flat.opaque += part.opaque
            flat.never = flat.never or part.never
        return flat

    def negate(self, raw: Schema) -> Schema | None:
        """A schema of exactly the values that ``raw`` rejects; None if no schema expresses that."""
        return Negation(self._translator).negated(raw)

    def _add(self, flat: Flat, raw: Schema) -> None:
        if raw is False:
            flat.never = True
        if isinstance(raw, bool):
            return
        if "unevaluatedProperties" in raw or "unevaluatedItems" in raw:
            raw = self._without_unevaluated(flat, raw)
        simple = {
            word: value
            for word, value in raw.items()
            if (word in TYPE_OF or word in ANY_TYPE) and not word.startswith("dependent")
        }
        # Properties keep the order in which the user wrote them, also those of an allOf that comes
        # first.
        words = list(raw)
        turn = words.index("properties") if "properties" in raw else 0
        for word in words[:turn]:
            self._add_word(flat, raw, word)
        if simple:
            flat.simple.append({ORIGIN: raw.get(ORIGIN, ""), **simple})
        for word in words[turn:]:
            self._add_word(flat, raw, word)

    def _add_word(self, flat: Flat, raw: Raw, word: str) -> None:
        value = raw[word]
        match word:
            case "$ref":
                self._add(flat, self._translator.translated(value[1:]))
            case "allOf":
                for part in value:
                    self._add(flat, part)
            case "anyOf" | "oneOf" if len(value) == 1:
                self._add(flat, value[0])
            case "oneOf":
                flat.exclusives.append(value)
            case "anyOf" if not any(branch is True for branch in value):
                flat.choices.append(value)
            case "not":
                negated = self.negate(value)
                if negated is None:
                    flat.opaque.append(_part_of(raw, {"not": value}))
                else:
                    self._add(flat, negated)
            case "if" if "then" in raw or "else" in raw:
                self._add_condition(flat, raw)
            case "dependentRequired":
                for name, needed in value.items():
                    if needed:
                        flat.choices.append(_dependent(raw, name, {"required": needed}))
            case "dependentSchemas":
                for name, needed in value.items():
                    flat.choices.append(_dependent(raw, name, needed))

    def _add_condition(self, flat: Flat, raw: Raw) -> None:
        negated = self.negate(raw["if"])
        if negated is None:
            words: Raw = {word: raw[word] for word in ("if", "then", "else") if word in raw}
            flat.opaque.append(_part_of(raw, words))
            return
        then, otherwise = raw.get("then", True), raw.get("else", True)
        cases = ((raw["if"], then), (then is True or negated, otherwise))
        flat.choices.append([_part_of(raw, {"allOf": list(case)}) for case in cases])

    def _without_unevaluated(self, flat: Flat, raw: Raw) -> Raw:
        """Say ``unevaluated...`` as additional properties and items, where that is known."""
        rest = {key: value for key, value in raw.items() if not key.startswith("unevaluated")}
        seen = self._opened(rest)
        said: list[Raw | None] = []
        if (properties := raw.get("unevaluatedProperties", True)) is not True:
            said.append(_additional_properties(seen, properties) if seen else None)
        if (items := raw.get("unevaluatedItems", True)) is not True:
            said.append(_additional_items(seen, items) if seen else None)
        if None in said:
            flat.opaque.append(_part_of(raw, {"allOf": [raw]}))
        flat.simple += [_part_of(raw, words) for words in said if words]
        return rest

    def _opened(self, raw: Raw) -> list[Raw] | None:
        """The schema and all that it holds the value to; None if that depends on the value."""
        opened: list[Schema] = [raw]
        for part in opened:
            if isinstance(part, bool):
                continue
            if len(opened) > MAX_OPENED or part.keys() & {"anyOf", "oneOf", "if", "dependentSchemas"}:  # fmt: skip
                return None
            opened += part.get("allOf", ())
            if "$ref" in part:
                opened.append(self._translator.translated(part["$ref"][1:]))
        return [part for part in opened if isinstance(part, dict)]


def _additional_properties(seen: list[Raw], schema: Schema) -> Raw:
    if any(part.keys() & {"additionalProperties", "unevaluatedProperties"} for part in seen):
        return {}
    return {
        "properties": {name: True for part in seen for name in part.get("properties", ())},
        "patternProperties": {p: True for part in seen for p in part.get("patternProperties", ())},
        "additionalProperties": schema,
    }


def _additional_items(seen: list[Raw], schema: Schema) -> Raw | None:
    if any("contains" in part for part in seen):
        return None
    if any(part.keys() & {"items", "unevaluatedItems"} for part in seen):
        return {}
    length = max(len(part.get("prefixItems", ())) for part in seen)
    return {"prefixItems": [True] * length, "items": schema}


def _dependent(raw: Raw, name: str, needed: Schema) -> list[Schema]:
    present = {"type": "object", "required": [name], "allOf": [needed]}
    return [_part_of(raw, {"properties": {name: False}}), _part_of(raw, present)]


def _part_of(raw: Raw, words: Raw) -> Raw:
    return {ORIGIN: raw.get(ORIGIN, ""), **words}
