"""What does a conjunction of schemas hold one value to, once references, ``allOf`` and negations are opened?"""

import dataclasses
from typing import Any

from radixrt.constrained.json_schema.errors import SchemaError
from radixrt.constrained.json_schema.keywords import (
    ANY_TYPE,
    IN_PLACE,
    NOT_IN,
    NOT_INTEGER,
    ORIGIN,
    TYPE_OF,
    TYPES,
    Schema,
)
from radixrt.constrained.json_schema.normal.translate import Translator
from radixrt.constrained.json_schema.normal.values import distinct

MAX_NEGATED = 64
"""Keywords that one negation may turn around; larger ones are left to a check."""

Raw = dict[str, Any]
"""A translated schema that is not a boolean."""


@dataclasses.dataclass
class Flat:
    """All of these hold for the value, unless ``never``."""

    simple: list[Raw] = dataclasses.field(default_factory=list)
    """Schemas of words about the value itself, none of which opens another schema for the same value."""
    choices: list[list[Schema]] = dataclasses.field(default_factory=list)
    """At least one of each list."""
    exclusives: list[list[Schema]] = dataclasses.field(default_factory=list)
    """Exactly one of each list."""
    opaque: list[Raw] = dataclasses.field(default_factory=list)
    """Schemas that cannot be said in other words."""
    never: bool = False

    def conjuncts(self) -> list[Schema]:
        """The same, as schemas."""
        anyof: list[Schema] = [{"anyOf": branches} for branches in self.choices]
        oneof: list[Schema] = [{"oneOf": branches} for branches in self.exclusives]
        return [False] if self.never else [*self.simple, *anyof, *oneof, *self.opaque]

    def types(self) -> set[str]:
        """The types that the value may have; ``integer`` stands for ``number`` where it must be one."""
        allowed = set(TYPES)
        for raw in self.simple:
            if "type" in raw:
                allowed = _common_types(allowed, _type_set(raw["type"]))
        return allowed


def _type_set(value: Any) -> set[str]:
    types = {value} if isinstance(value, str) else set(value)
    return types - {"integer"} if "number" in types else types


def _common_types(one: set[str], other: set[str]) -> set[str]:
    common = one & other
    if ("integer" in one and "number" in other) or ("integer" in other and "number" in one):
        common.add("integer")
    return common


class Flattener:
    """Opens schemas. Schemas are never copied deeply, and never changed."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def flatten(self, conjuncts: list[Schema]) -> Flat:
        """Raises:
        SchemaError: a ``$ref`` leads back to itself without a step into the value.
        """
        flat = Flat()
        for raw in conjuncts:
            self._add(flat, raw, ())
        return flat

    def _add(self, flat: Flat, raw: Schema, path: tuple[str, ...]) -> None:
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
        # Properties keep the order in which the user wrote them, also those of an allOf that comes first.
        words = list(raw)
        turn = words.index("properties") if "properties" in raw else 0
        for word in words[:turn]:
            self._add_word(flat, raw, word, path)
        if simple:
            flat.simple.append({ORIGIN: raw.get(ORIGIN, ""), **simple})
        for word in words[turn:]:
            self._add_word(flat, raw, word, path)

    def _add_word(self, flat: Flat, raw: Raw, word: str, path: tuple[str, ...]) -> None:
        if word in IN_PLACE:
            self._add_in_place(flat, raw, word, path)
        elif word == "dependentRequired":
            for name, needed in raw[word].items():
                if needed:
                    flat.choices.append(_dependent(raw, name, {"required": needed}))
        elif word == "dependentSchemas":
            for name, schema in raw[word].items():
                flat.choices.append(_dependent(raw, name, schema))

    def _add_in_place(self, flat: Flat, raw: Raw, word: str, path: tuple[str, ...]) -> None:
        value = raw[word]
        if word == "$ref":
            if value in path:
                raise SchemaError(
                    "$ref", raw.get(ORIGIN, "") + "/$ref", f"{value!r} leads back to itself without a step into the value."
                )  # fmt: skip
            self._add(flat, self._translator.at(value[1:]), (*path, value))
        elif word == "allOf":
            for part in value:
                self._add(flat, part, path)
        elif word in ("anyOf", "oneOf"):
            if len(value) == 1:
                self._add(flat, value[0], path)
            elif word == "oneOf":
                flat.exclusives.append(value)
            elif not any(branch is True for branch in value):
                flat.choices.append(value)
        elif word == "not":
            negated = self.negate(value)
            if negated is None:
                flat.opaque.append({ORIGIN: raw.get(ORIGIN, ""), "not": value})
            else:
                self._add(flat, negated, path)
        elif word == "if" and ("then" in raw or "else" in raw):
            negated = self.negate(value)
            then, otherwise = raw.get("then", True), raw.get("else", True)
            if negated is None:
                flat.opaque.append(
                    {key: raw[key] for key in (ORIGIN, "if", "then", "else") if key in raw}
                )
            elif otherwise is True:
                flat.choices.append([negated, _both(raw, value, then)])
            elif then is True:
                flat.choices.append([value, otherwise])
            else:
                flat.choices.append([_both(raw, value, then), _both(raw, negated, otherwise)])

    # What unevaluated words see

    def _without_unevaluated(self, flat: Flat, raw: Raw) -> Raw:
        rest = {key: value for key, value in raw.items() if not key.startswith("unevaluated")}
        opaque = False
        if "unevaluatedProperties" in raw and raw["unevaluatedProperties"] is not True:
            seen = self._seen_properties(rest, 0)
            if seen is None:
                opaque = True
            elif not seen[2]:
                names, patterns, _ = seen
                flat.simple.append(
                    {
                        ORIGIN: raw.get(ORIGIN, ""),
                        "properties": dict.fromkeys(names, True),
                        "patternProperties": dict.fromkeys(patterns, True),
                        "additionalProperties": raw["unevaluatedProperties"],
                    }
                )
        if "unevaluatedItems" in raw and raw["unevaluatedItems"] is not True:
            prefix = self._seen_items(rest, 0)
            if prefix is None:
                opaque = True
            elif prefix >= 0:
                flat.simple.append(
                    {
                        ORIGIN: raw.get(ORIGIN, ""),
                        "prefixItems": [True] * prefix,
                        "items": raw["unevaluatedItems"],
                    }
                )
        if opaque:
            flat.opaque.append({ORIGIN: raw.get(ORIGIN, ""), "allOf": [raw]})
        return rest

    def _seen_properties(self, raw: Schema, depth: int) -> tuple[list[str], list[str], bool] | None:
        """Names, patterns and whether all properties are evaluated; None: that depends on the value."""
        if isinstance(raw, bool):
            return [], [], False
        if depth > 50 or raw.keys() & {"anyOf", "oneOf", "if", "dependentSchemas"}:
            return None
        names, patterns = list(raw.get("properties", ())), list(raw.get("patternProperties", ()))
        everything = "additionalProperties" in raw or "unevaluatedProperties" in raw
        for part in self._opened(raw):
            seen = self._seen_properties(part, depth + 1)
            if seen is None:
                return None
            names, patterns = names + seen[0], patterns + seen[1]
            everything = everything or seen[2]
        return names, patterns, everything

    def _seen_items(self, raw: Schema, depth: int) -> int | None:
        """How many items are evaluated, -1 for all; None: that depends on the value."""
        if isinstance(raw, bool):
            return 0
        if depth > 50 or raw.keys() & {"anyOf", "oneOf", "if", "dependentSchemas", "contains"}:
            return None
        if "items" in raw or "unevaluatedItems" in raw:
            return -1
        count = len(raw.get("prefixItems", ()))
        for part in self._opened(raw):
            seen = self._seen_items(part, depth + 1)
            if seen is None or seen < 0:
                return seen
            count = max(count, seen)
        return count

    def _opened(self, raw: Raw) -> list[Schema]:
        parts = list(raw.get("allOf", ()))
        if "$ref" in raw:
            parts.append(self._translator.at(raw["$ref"][1:]))
        return parts

    # Negation

    def negate(self, raw: Schema) -> Schema | None:
        """A schema of exactly the values that ``raw`` rejects, or None where no words say that."""
        return _Negation(self._translator).of(raw, ())


def _dependent(raw: Raw, name: str, needed: Schema) -> list[Schema]:
    origin = raw.get(ORIGIN, "")
    return [
        {ORIGIN: origin, "properties": {name: False}},
        {
            ORIGIN: origin,
            "type": "object",
            "required": [name],
            "allOf": [needed],
        },
    ]


def _both(raw: Raw, one: Schema, other: Schema) -> Schema:
    return {ORIGIN: raw.get(ORIGIN, ""), "allOf": [one, other]}


class _Negation:
    """Turns one schema around."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._left = MAX_NEGATED

    def of(self, raw: Schema, path: tuple[str, ...]) -> Schema | None:
        if isinstance(raw, bool):
            return not raw
        if raw.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            return None
        alternatives: list[Schema] = []
        for word, value in raw.items():
            self._left -= 1
            if self._left < 0:
                return None
            if word in (ORIGIN, "then", "else", "minContains", "maxContains"):
                continue
            ways = self._word(raw, word, value, path)
            if ways is None:
                return None
            alternatives += [_with_origin(way, raw) for way in ways if way is not False]
        if not alternatives:
            return False
        return alternatives[0] if len(alternatives) == 1 else _with_origin({"anyOf": alternatives}, raw)  # fmt: skip

    def _word(self, raw: Raw, word: str, value: Any, path: tuple[str, ...]) -> list[Schema] | None:
        """Schemas one of which a value must satisfy that violates this word."""
        if word in _NEGATED_BOUNDS:
            kind, opposite, step = _NEGATED_BOUNDS[word]
            bound = value + step
            if step and bound < 0:
                return []
            return [{"type": kind, opposite: bound}]
        if word == "type":
            return _other_types(value)
        if word in ("const", "enum"):
            return [{NOT_IN: [value] if word == "const" else value}]
        if word == NOT_IN:
            return [{"enum": value}]
        if word == NOT_INTEGER:
            return [{"type": "integer"}]
        if word == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if word == "dependentRequired":
            return [
                {"type": "object", "required": [name], "properties": {key: False}}
                for name, needed in value.items()
                for key in needed
                if key != name
            ]
        if word == "properties":
            return self._properties(value, path)
        if word == "contains":
            return self._contains(raw, value, path)
        if (word == "additionalProperties" and value is True) or (
            word == "items" and value is True
        ):
            return []
        if word == "uniqueItems" and value is False:
            return []
        return self._in_place(raw, word, value, path) if word in IN_PLACE else None

    def _properties(self, value: dict[str, Schema], path: tuple[str, ...]) -> list[Schema] | None:
        ways: list[Schema] = []
        for name, schema in value.items():
            negated = self.of(schema, ())
            if negated is None:
                return None
            if negated is not False:
                ways.append({"type": "object", "required": [name], "properties": {name: negated}})
        return ways

    def _contains(self, raw: Raw, value: Schema, path: tuple[str, ...]) -> list[Schema] | None:
        if raw.get("minContains", 1) != 1 or "maxContains" in raw:
            return None
        negated = self.of(value, ())
        return None if negated is None else [{"type": "array", "items": negated}]

    def _in_place(
        self, raw: Raw, word: str, value: Any, path: tuple[str, ...]
    ) -> list[Schema] | None:
        if word == "not":
            return [value]
        if word == "$ref":
            if value in path or len(path) > 20:
                return None
            negated = self.of(self._translator.at(value[1:]), (*path, value))
            return None if negated is None else [negated]
        if word == "if":
            return self._conditional(raw, path)
        if word == "oneOf" and len(value) > 1:
            return None
        parts: list[Schema] = []
        for part in value:
            negated = self.of(part, path)
            if negated is None:
                return None
            parts.append(negated)
        return parts if word == "allOf" else [{"allOf": parts}]

    def _conditional(self, raw: Raw, path: tuple[str, ...]) -> list[Schema] | None:
        if "then" not in raw and "else" not in raw:
            return []
        negated = self.of(raw["if"], path)
        then, otherwise = self.of(raw.get("then", True), path), self.of(raw.get("else", True), path)
        if negated is None or then is None or otherwise is None:
            return None
        return [{"allOf": [raw["if"], then]}, {"allOf": [negated, otherwise]}]


_NEGATED_BOUNDS = {
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


def _other_types(value: Any) -> list[Schema]:
    types = _type_set(value)
    others = [kind for kind in TYPES if kind not in types and not (kind == "number" and "integer" in types)]  # fmt: skip
    ways: list[Schema] = [{"type": others}] if others else []
    if "integer" in types:
        ways.append({"type": "number", NOT_INTEGER: True})
    return ways


def _with_origin(raw: Schema, parent: Raw) -> Schema:
    if isinstance(raw, bool) or ORIGIN in raw:
        return raw
    return {ORIGIN: parent.get(ORIGIN, ""), **raw}


def values_of(simple: list[Raw]) -> list[Any] | None:
    """The values of the shortest ``enum`` or ``const``; None without one."""
    lists: list[list[Any]] = [raw["enum"] for raw in simple if "enum" in raw]
    lists += [[raw["const"]] for raw in simple if "const" in raw]
    if not lists:
        return None
    shortest = min(lists, key=len)
    return distinct(shortest)
