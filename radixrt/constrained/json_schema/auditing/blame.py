"""Finds the keyword because of which llguidance refuses a schema, by compiling parts of the schema."""

import json
from typing import Any

from radixrt.constrained.json_schema.auditing.compiling import compile_error
from radixrt.constrained.json_schema.auditing.features import constraints
from radixrt.constrained.json_schema.auditing.relax import fewest_to_drop
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.position import note
from radixrt.constrained.json_schema.walk import (
    Place,
    at,
    children,
    met_with,
    reference_target,
    without_origins,
)

MAX_CHARACTERS = 2_000_000
"""Bytes of JSON text that are compiled at most to find the faults of one schema (a second of work); then it is refused."""

Blame = tuple[Place, tuple[str, ...], str]
"""Place of a node, its keywords without which it compiles, and llguidance's error."""


class Search:
    """Searches for the faults of one schema, which is reduced between two searches."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS
        self._schema: Any = None
        self._with_origins: Any = None
        self._definitions: dict[Any, Any] = {}
        self._open: set[Place] = set()
        self._searched: set[Place] = set()
        self._errors: dict[str, str | None] = {}

    def blamed(self, schema: Any, error: str) -> list[Blame]:
        """Keywords to give up; empty if none is found within the budget."""
        self._with_origins = schema
        self._schema = schema = without_origins(schema)
        self._definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._searched = set()
        return (self._every_one_of() if "oneOf" in error else []) or self._all_deepest(())

    def unsatisfiable(self, schema: Any) -> Place:
        """The place of a definition that no value satisfies; empty if there is none."""
        self._with_origins = schema
        self._schema = schema = without_origins(schema)
        self._definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        for name in self._definitions:
            place: Place = ("$defs", name)
            if "nsatisfiable" in (self._error_of(self._at(place)) or ""):
                return place
        return ()

    def _every_one_of(self) -> list[Blame]:
        """All ``oneOf`` that don't compile alone, so that a schema of many needs few rounds."""
        all_of_them = [
            place
            for place, node in met_with(self._schema)
            if isinstance(node, dict) and "oneOf" in node
        ]
        found: list[Blame] = []
        for place in all_of_them:
            node = self._at(place)
            error = self._error_of({"oneOf": node["oneOf"]}) or self._error_of(node) or ""
            # A branch that alone is refused for a oneOf comes first.
            if "oneOf" in error and not any(
                "oneOf" in (self._error_of(branch) or "") for branch in node["oneOf"]
            ):
                found.append((place, ("oneOf",), error))
        # Each may compile alone, but not together with the other keywords for the same value.
        return found or [(place, ("oneOf",), "its branches may overlap") for place in all_of_them]

    def _all_deepest(self, place: Place) -> list[Blame]:
        """The keywords of each node that doesn't compile though all below it do."""
        self._open.add(place)
        node = self._at(place)
        below = [place + path for path, _ in children(node)]
        if (target := reference_target(node)) is not None:
            below.append(target)
        failing = [p for p in below if p not in self._open and self._fails(p)]
        found: list[Blame] = []
        for each in failing:
            if each not in self._searched:
                found += self._all_deepest(each)
        self._open.remove(place)
        self._searched.add(place)
        if failing:
            return found
        error = self._error_of(node)
        if not isinstance(node, dict) or error is None:
            return []
        dropped = fewest_to_drop(node, constraints(node), lambda each: self._error_of(each) is None)
        return [(place, dropped, error)] if dropped else []

    def _fails(self, place: Place) -> bool:
        error = self._error_of(self._at(place))
        return error is not None and "nsatisfiable" not in error

    def _at(self, place: Place) -> Any:
        node = at(self._with_origins, place)
        note("search", node.get(ORIGIN, "") if isinstance(node, dict) else "")
        return at(self._schema, place)

    def _error_of(self, node: Any) -> str | None:
        """llguidance's error for a node compiled as a schema of its own."""
        if isinstance(node, bool) or self._left <= 0:
            return None
        text = json.dumps(self._with_definitions(node), ensure_ascii=False)
        if text not in self._errors:
            self._left -= len(text)
            self._errors[text] = compile_error(text)
        return self._errors[text]

    def _with_definitions(self, node: Any) -> Any:
        """The node with the definitions that it can reach."""
        names: set[str | int] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if (target := reference_target(each)) is not None and target[1] not in names:
                names.add(target[1])
                waiting.append(self._definitions[target[1]])
            waiting += [child for _, child in children(each)]
        kept = {name: self._definitions[name] for name in self._definitions if name in names}
        return {**node, "$defs": kept} if kept else node
