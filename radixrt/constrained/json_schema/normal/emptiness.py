"""Lists the combinations of branches that a value can satisfy, and proves cheaply, where possible, that
no value satisfies a conjunction of schemas."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.checks import checkable
from radixrt.constrained.json_schema.keywords import (
    NOT_IN,
    NOT_INTEGER,
    ORIGIN,
    Schema,
    mapped,
    values_in,
)
from radixrt.constrained.json_schema.normal.containers import (
    Shape,
    item_conjuncts,
    longest_prefix,
    required_names,
)
from radixrt.constrained.json_schema.normal.document import Translator
from radixrt.constrained.json_schema.normal.flatten import (
    Flat,
    Flattener,
    Raw,
    count_bounds,
    type_set,
)
from radixrt.constrained.json_schema.normal.scalars import literal_forms, number_forms, string_forms
from radixrt.constrained.json_schema.patterns import matches
from radixrt.constrained.json_schema.validation import SchemaValidator


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


MAX_LEVELS = 5
"""How far below the value itself a contradiction is looked for."""
MAX_STEPS = 400
"""Conjunctions that one question may look at."""
MAX_VALUES = 64
"""Longer lists of values are assumed to contain one that fits."""


class Emptiness:
    """Answers "no value for sure" or "maybe one"."""

    def __init__(self, flattener: Flattener, judge: Judge) -> None:
        self._flattener = flattener
        self._judge = judge
        self._steps = 0

    def is_certain(self, conjuncts: list[Schema]) -> bool:
        self._steps = MAX_STEPS
        return self._is_empty(conjuncts, MAX_LEVELS)

    def _is_empty(self, conjuncts: list[Schema], levels: int) -> bool:
        self._steps -= 1
        if levels < 0 or self._steps < 0:
            return False
        flat = self._flattener.flatten(conjuncts)
        if flat.never:
            return True
        values = flat.values()
        if values is not None:
            if len(values) > MAX_VALUES:
                return False
            return not self._judge.sort(values, flat.conjuncts())[0]
        if all(self._has_none(kind, flat, levels) for kind in flat.types()):
            return True
        return any(
            all(self._is_empty([*flat.simple, branch], levels - 1) for branch in branches)
            for branches in (*flat.choices, *flat.exclusives)
            if len(branches) <= 30
        )

    def _has_none(self, kind: str, flat: Flat, levels: int) -> bool:
        if kind in ("number", "integer"):
            return not number_forms(flat.simple, kind == "integer")
        if kind == "string":
            return not string_forms(flat.simple)
        if kind in ("null", "boolean"):
            return not literal_forms(flat.simple, kind)
        if kind == "array":
            return self._no_array(flat.simple, levels)
        return self._no_object(flat.simple, levels)

    def _no_array(self, simple: list[Raw], levels: int) -> bool:
        least, most = count_bounds(simple, "Items")
        if most is not None and least > most:
            return True
        return any(
            self._is_empty(item_conjuncts(simple, index), levels - 1)
            for index in range(min(least, longest_prefix(simple) + 1))
        )

    def _no_object(self, simple: list[Raw], levels: int) -> bool:
        required = required_names(simple)
        least, most = count_bounds(simple, "Properties")
        if most is not None and max(least, len(required)) > most:
            return True
        shapes = [Shape.from_schema(raw) for raw in simple]
        if any(shape.closed and least > len(shape.properties) for shape in shapes):
            return True
        for name in required:
            schemas = [schema for shape in shapes for schema in shape.schemas_of(name) or ()]
            if schemas and self._is_empty(schemas, levels - 1):
                return True
        return False


MAX_COMBINATIONS = 64
"""Alternatives that branches are multiplied out to; beyond, a choice stays beside the form."""
MAX_PAIRS = 2000
"""Pairs of branches of one ``oneOf`` that are compared."""
MAX_OVERLAPPING = 4
"""Overlapping branches that are made disjoint by denying one another."""


class Alternatives:
    """Simplifies the choices of a conjunction."""

    def __init__(self, flattener: Flattener, is_empty: Callable[[list[Schema]], bool]) -> None:
        self._flattener = flattener
        self._is_empty = is_empty

    def simplify(self, flat: Flat) -> None:
        """Turn ``oneOf`` into choices and drop denials that can't be met, if certain."""
        opaque = []
        for raw in flat.opaque:
            if "not" in raw and self._is_empty([*flat.simple, raw["not"]]):
                continue
            if "if" in raw and self._is_empty([*flat.simple, raw["if"]]):
                flat.choices.append([raw.get("else", True)])
                continue
            opaque.append(raw)
        flat.opaque = opaque
        exclusives, flat.exclusives = flat.exclusives, []
        for branches in exclusives:
            live = [b for b in branches if not self._is_empty([*flat.simple, b])]
            groups = self._overlapping(flat, live)
            ways = [self._of_group(group) for group in groups]
            if len(groups) == 1 and ways[0] == [{"oneOf": groups[0]}]:
                flat.exclusives += groups
            else:
                flat.choices.append([way for each in ways for way in each])

    def _overlapping(self, flat: Flat, live: list[Schema]) -> list[list[Schema]]:
        """The branches in groups: those of different groups have no value in common."""
        if len(live) * (len(live) - 1) // 2 > MAX_PAIRS:
            return [live]
        groups: list[list[Schema]] = []
        for branch in live:
            apart: list[list[Schema]] = []
            merged: list[Schema] = []
            for group in groups:
                is_apart = all(self._is_empty([*flat.simple, other, branch]) for other in group)
                if is_apart:
                    apart.append(group)
                else:
                    merged += group
            groups = [*apart, [*merged, branch]]
        return groups

    def _of_group(self, group: list[Schema]) -> list[Schema]:
        """Alternatives for "exactly one of these"."""
        if len(group) == 1:
            return group
        denials = (
            [self._flattener.negate(b) for b in group] if len(group) <= MAX_OVERLAPPING else [None]
        )
        if None in denials:
            return [{"oneOf": group}]
        return [
            {
                ORIGIN: branch.get(ORIGIN, "") if isinstance(branch, dict) else "",
                "allOf": [branch, *denials[:index], *denials[index + 1 :]],
            }
            for index, branch in enumerate(group)
        ]

    def combine(self, flat: Flat) -> list[list[Schema]]:
        """All consistent ways to take a branch of each choice; too many choices become opaque."""
        ways: list[list[Schema]] = [[]]
        for branches in sorted(flat.choices, key=len):
            if len(ways) * len(branches) > MAX_COMBINATIONS * 8:
                following = None
            else:
                following = [
                    [*way, branch]
                    for way in ways
                    for branch in branches
                    if not self._is_empty([*flat.simple, *way, branch])
                ]
            if following is None or len(following) > max(MAX_COMBINATIONS, len(branches)):
                flat.opaque.append({ORIGIN: "", "anyOf": branches})
            else:
                ways = following
        return ways
