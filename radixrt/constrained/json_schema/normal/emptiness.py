"""Proves cheaply, where possible, that no value satisfies a conjunction of schemas."""

from radixrt.constrained.json_schema.keywords import Schema
from radixrt.constrained.json_schema.normal.arrays import item_conjuncts, longest_prefix
from radixrt.constrained.json_schema.normal.flatten import Flat, Flattener, Raw, count_bounds
from radixrt.constrained.json_schema.normal.objects import Shape, required_names
from radixrt.constrained.json_schema.normal.scalars import literal_forms, number_forms, string_forms
from radixrt.constrained.json_schema.normal.validity import Judge

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
