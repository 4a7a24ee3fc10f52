"""Finds the keywords without which llguidance compiles a schema: the rest is a superset."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from radixrt.constrained.backends.llguidance import schema_error
from radixrt.constrained.json_schema.enforced import constraining
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.position import note
from radixrt.constrained.json_schema.walk import (
    Node,
    Place,
    children,
    met_with,
    places_below,
    reference_target,
    subschema,
    without_origins,
)

MAX_CHARACTERS = 2_000_000
"""Characters of JSON text that are compiled at most to find what one schema is refused for (a
second of work); then the schema is refused."""

_TAKEN_ALONG = {
    "prefixItems": ("items", "unevaluatedItems"),
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
    "$ref": ("unevaluatedItems", "unevaluatedProperties"),
    "anyOf": ("unevaluatedItems", "unevaluatedProperties"),
    "allOf": ("unevaluatedItems", "unevaluatedProperties"),
    "dependentSchemas": ("unevaluatedProperties",),
}
"""Keywords that depend on another keyword: without it they would forbid more than before."""

MIN_MISSED = (
    "not", "if", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
    "dependentRequired", "dependentSchemas", "propertyNames", "minProperties", "maxProperties", "multipleOf",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minimum", "maximum", "format", "pattern",
    "oneOf", "minItems", "maxItems", "patternProperties", "additionalProperties", "allOf", "anyOf", "$ref", "required",
    "prefixItems", "items", "const", "enum", "properties",
)  # fmt: skip
"""Order in which keywords are removed, where one of several has to be."""


def without(node: Node, keywords: Iterable[str]) -> Node:
    """A superset of the node that makes no use of these keywords; ``oneOf`` becomes ``anyOf``."""
    result = dict(node)
    for keyword in keywords:
        value = result.pop(keyword, None)
        for other in _TAKEN_ALONG.get(keyword, ()):
            result.pop(other, None)
        if keyword == "oneOf" and value is not None and "anyOf" not in result:
            result["anyOf"] = value
    return result


def fewest_to_drop(
    node: Node, suspects: Iterable[str], is_fine: Callable[[Any], bool], budget: int = 200
) -> tuple[str, ...] | None:
    """The smallest set of keywords without which the node is fine; None if it never is."""
    present = [keyword for keyword in MIN_MISSED if keyword in set(suspects)]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(present, size) for size in range(1, len(present) + 1)
    )
    for keywords in itertools.islice(subsets, budget):
        if is_fine(without(node, keywords)):
            return keywords
    return tuple(present) if present and is_fine(without(node, present)) else None


class Refused(NamedTuple):
    """A node that llguidance refuses though it compiles all below it."""

    place: Place
    keywords: tuple[str, ...]
    """Keywords without which the node compiles."""
    error: str


class RefusalSearch:
    """Finds what llguidance refuses one schema for, by compiling parts of it. The schema is reduced
    between two searches."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS
        self._schema: Any = None
        self._with_origins: Any = None
        self._open: set[Place] = set()
        self._searched: set[Place] = set()
        self._errors: dict[str, str | None] = {}

    def refused_nodes(self, schema: Any, error: str) -> list[Refused]:
        """The nodes that ``error`` is about; empty if none is found within the budget."""
        self._set_schema(schema)
        return (self._each_one_of() if "oneOf" in error else []) or self._deepest(())

    def unsatisfiable_definition(self, schema: Any) -> Place:
        """The place of a definition that no value satisfies; empty if there is none."""
        self._set_schema(schema)
        places: Iterable[Place] = (("$defs", name) for name in self._definitions)
        return next((p for p in places if "nsatisfiable" in (self._error_of_place(p) or "")), ())

    def _set_schema(self, schema: Any) -> None:
        self._with_origins = schema
        self._schema = without_origins(schema)
        self._searched = set()

    @property
    def _definitions(self) -> dict[str, Any]:
        return self._schema.get("$defs", {}) if isinstance(self._schema, dict) else {}

    def _each_one_of(self) -> list[Refused]:
        """All ``oneOf`` that don't compile alone, so that a schema of many needs few rounds."""
        nodes = dict(met_with(self._schema))
        places = [p for p, node in nodes.items() if isinstance(node, dict) and "oneOf" in node]
        found: list[Refused] = []
        for place in places:
            self._note(place)
            node = nodes[place]
            error = self._error_of({"oneOf": node["oneOf"]}) or self._error_of(node) or ""
            # A branch that alone is refused for a oneOf comes first.
            if "oneOf" in error and not any(
                "oneOf" in (self._error_of(branch) or "") for branch in node["oneOf"]
            ):
                found.append(Refused(place, ("oneOf",), error))
        # Each may compile alone, but not together with the other keywords for the same value.
        return found or [Refused(p, ("oneOf",), "its branches may overlap") for p in places]

    def _deepest(self, place: Place) -> list[Refused]:
        """The nodes from a place on that don't compile though all below them do."""
        self._open.add(place)
        node = subschema(self._schema, place)
        failing = [
            below
            for below in places_below(node, place)
            if below not in self._open
            and (error := self._error_of_place(below)) is not None
            and "nsatisfiable" not in error
        ]
        found: list[Refused] = []
        for below in failing:
            if below not in self._searched:
                found += self._deepest(below)
        self._open.remove(place)
        self._searched.add(place)
        if failing:
            return found
        error = self._error_of_place(place)
        if not isinstance(node, dict) or error is None:
            return []
        dropped = fewest_to_drop(
            node, constraining(node), lambda each: self._error_of(each) is None
        )
        return [Refused(place, dropped, error)] if dropped else []

    def _note(self, place: Place) -> None:
        node = subschema(self._with_origins, place)
        note("search", node.get(ORIGIN, "") if isinstance(node, dict) else "")

    def _error_of_place(self, place: Place) -> str | None:
        self._note(place)
        return self._error_of(subschema(self._schema, place))

    def _error_of(self, node: Any) -> str | None:
        """llguidance's error for a node compiled as a schema of its own."""
        if isinstance(node, bool) or self._left <= 0:
            return None
        text = json.dumps(self._with_definitions(node), ensure_ascii=False)
        if text not in self._errors:
            self._left -= len(text)
            self._errors[text] = schema_error(text)
        return self._errors[text]

    def _with_definitions(self, node: Any) -> Any:
        """The node with the definitions that it can reach."""
        names: set[str | int] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if (target := reference_target(each)) is not None and target[1] not in names:
                names.add(target[1])
                waiting.append(self._definitions[str(target[1])])
            waiting += [child for _, child in children(each)]
        kept = {name: self._definitions[name] for name in self._definitions if name in names}
        return {**node, "$defs": kept} if kept else node
