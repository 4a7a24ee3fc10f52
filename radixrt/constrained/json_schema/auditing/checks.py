"""Places the checks for the keywords that a grammar does not enforce: on which values, against which schema.

A check is placed on the smallest value that every answer reaches on the same path: through properties, items
and additional properties, but never through an ``anyOf`` or a reference to an enclosing schema.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.constrained.grammar import SpanCheck
from radixrt.constrained.json_schema.checkable import checkable
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.walk import (
    Place,
    at,
    children,
    met_with,
    reference_target,
)

Faults = dict[Place, tuple[str, ...]]
"""Keywords that no grammar enforces, by the place of their node."""

MAX_CHECKS = 100
"""A schema with more (definitions used in many places multiply) is checked as a whole."""


def place_checks(schema: Any, normalised: Any, faults: Faults) -> tuple[SpanCheck, ...]:
    """Checks that together cover all faults of a schema, which was made from the normalised one.

    Raises:
        CannotEnforce: a keyword under a check can't be checked either.
    """
    placing = _Placing(schema, normalised, faults)
    checks = tuple(itertools.islice(placing.below((), (), frozenset()), MAX_CHECKS + 1))
    return checks if len(checks) <= MAX_CHECKS else (placing.check((), ()),)


@dataclass
class _Placing:
    schema: Any
    """In which the faults were found."""
    normalised: Any
    """From which the checks are cut; same places, but for those below ``patternProperties``."""
    faults: Faults
    _under: dict[Place, set[Place]] = field(default_factory=lambda: defaultdict(set))
    """Places of the faults that a value at a place can meet."""

    def __post_init__(self) -> None:
        leading_to: dict[Place, list[Place]] = defaultdict(list)
        for place, node in met_with(self.schema):
            below = [place + path for path, _ in children(node)]
            if (target := reference_target(node)) is not None:
                below.append(target)
            for each in below:
                leading_to[each].append(place)
        for fault in self.faults:
            waiting = [fault]
            while waiting:
                place = waiting.pop()
                if fault not in self._under[place]:
                    self._under[place].add(fault)
                    waiting += leading_to[place]

    def below(
        self, place: Place, path: tuple[str | None, ...], behind: frozenset[Place]
    ) -> Iterator[SpanCheck]:
        """Checks of the values at ``path``, whose schema is at ``place``, reached through the references ``behind``."""
        if not self._under[place]:
            return
        node = at(self.schema, place)
        target = reference_target(node)
        if (
            target is not None
            and target not in behind
            and place not in self.faults
            and not node.keys() - {"$ref", "$defs", ORIGIN}
        ):
            yield from self.below(target, path, behind | {target})
            return
        steps = list(_unconditional(node))
        if self._must_stop(place, node, {under for under, _ in steps}, behind):
            yield self.check(place, path)
            return
        for under, step in steps:
            yield from self.below(place + under, (*path, step), behind)

    def _must_stop(
        self, place: Place, node: Any, below: set[Place], behind: frozenset[Place]
    ) -> bool:
        """Whether a fault is the node's own, or met only under some condition, or leads back here."""
        if place in self.faults:
            return True
        target = reference_target(node)
        if target is not None and self._under[target]:
            return True
        for under, child in children(node):
            back = reference_target(child) in behind
            if (under not in below or back) and self._under[place + under]:
                return True
        return False

    def check(self, place: Place, path: tuple[str | None, ...]) -> SpanCheck:
        node = at(self.normalised, place)
        found = self._under[place]
        return SpanCheck(
            path=path,
            schema=self_contained(self.normalised, place),
            pointer=node.get(ORIGIN, "") if isinstance(node, dict) else "",
            keywords=tuple(sorted({keyword for p in found for keyword in self.faults[p]})),
        )


def _unconditional(node: Any) -> Iterator[tuple[Place, str | None]]:
    """Subschemas that every part at one step of the path is held to, with the step."""
    if not isinstance(node, dict):
        return
    for name in node.get("properties", {}):
        yield ("properties", name), name
    if "items" in node and not node.get("prefixItems"):
        yield ("items",), None
    if "additionalProperties" in node and not (
        node.get("properties") or node.get("patternProperties") or "items" in node
    ):
        yield ("additionalProperties",), None


def self_contained(schema: Any, place: Place = ()) -> Any:
    """The node at a place as a schema of its own, written for a validator in Python, with the definitions that it needs.

    Raises:
        CannotEnforce: it holds a keyword that can't be checked.
    """
    node = at(schema, place)
    if not isinstance(node, dict):
        return node
    result = checkable({keyword: value for keyword, value in node.items() if keyword != "$defs"})
    names = {target[1] for _, node in met_with(schema, place) if (target := reference_target(node))}
    if names:
        result["$defs"] = {name: checkable(schema["$defs"][name]) for name in sorted(names)}
    return result
