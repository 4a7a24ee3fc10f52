"""Which keyword does a library mean that refuses a schema without a pointer? Found by compiling parts of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from radixrt.constrained.json_schema.auditing.compiling import compile_error
from radixrt.constrained.json_schema.auditing.features import constraints
from radixrt.constrained.json_schema.auditing.relax import fewest_to_drop
from radixrt.constrained.json_schema.auditing.walk import (
    Place,
    at,
    children,
    reachable,
    reference_target,
)

MOST_CHARACTERS = 20_000_000
"""Of JSON text that is compiled to find the culprits of one schema, some seconds' work: it is refused after that."""

Blame = tuple[Place, tuple[str, ...], str]
"""Place of a node, keywords of it without which it compiles, and what the library said of it."""


def empty_definitions(schema: Any, backend: str) -> set[Place]:
    """Definitions that are referred to and that, by the word of the library, no value satisfies."""
    targets = {reference_target(node) for _, node in reachable(schema)} - {None}
    search = _Search(schema, backend, Budget())
    return {
        target
        for target in targets
        if target and "nsatisfiable" in (search.error_of(at(schema, target)) or "")
    }


@dataclass
class Budget:
    """What may still be spent on one schema."""

    characters: int = MOST_CHARACTERS


def blamed(schema: Any, backend: str, error: str, budget: Budget) -> list[Blame]:
    """Keywords to give up; empty if none is found within the budget, or if no value satisfies the schema."""
    if "nsatisfiable" in error:
        return []
    search = _Search(schema, backend, budget)
    return (search.every_one_of() if "oneOf" in error else []) or search.all_deepest(())


class _Search:
    def __init__(self, schema: Any, backend: str, budget: Budget) -> None:
        self.schema = schema
        self.backend = backend
        self.budget = budget
        self._definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._size = len(json.dumps(self._definitions))
        self._seen: set[Place] = set()

    def every_one_of(self) -> list[Blame]:
        """All ``oneOf`` that don't compile alone, so that a schema of many needs few rounds."""
        all_of_them = [
            (place, node)
            for place, node in reachable(self.schema)
            if isinstance(node, dict) and "oneOf" in node
        ]
        found: list[Blame] = []
        for place, node in all_of_them:
            error = self.error_of({"oneOf": node["oneOf"]}) or self.error_of(node)
            if error and "oneOf" in error and not self._below_fails(node["oneOf"]):
                found.append((place, ("oneOf",), error))
        if found:
            return found
        # Each compiles alone; together with what else holds for the same value they don't.
        return [(place, ("oneOf",), "its branches may overlap") for place, _ in all_of_them]

    def _below_fails(self, branches: list[Any]) -> bool:
        """Whether a branch alone is refused for a ``oneOf``: that one comes first."""
        errors = (self.error_of(branch) for branch in branches)
        return any(error is not None and "oneOf" in error for error in errors)

    def all_deepest(self, place: Place) -> list[Blame]:
        """The keywords of each node that doesn't compile though all below it do."""
        self._seen.add(place)
        below = [p for p in self._below(place) if p not in self._seen and self._fails(p)]
        found = [blame for p in below if p not in self._seen for blame in self.all_deepest(p)]
        if below:
            return found
        node = at(self.schema, place)
        error = self.error_of(node)
        if not isinstance(node, dict) or error is None:
            return []
        dropped = fewest_to_drop(node, constraints(node), lambda each: self.error_of(each) is None)
        return [(place, dropped, error)] if dropped else []

    def _below(self, place: Place) -> Iterator[Place]:
        node = at(self.schema, place)
        yield from (place + path for _, path, _ in children(node))
        if (target := reference_target(node)) is not None:
            yield target

    def _fails(self, place: Place) -> bool:
        error = self.error_of(at(self.schema, place))
        return error is not None and "nsatisfiable" not in error

    def error_of(self, node: Any) -> str | None:
        """What the library says of a node as a schema of its own."""
        if isinstance(node, bool) or self.budget.characters <= 0:
            return None
        self.budget.characters -= self._size + len(json.dumps(node))
        return compile_error(self.backend, {**node, "$defs": self._definitions})
