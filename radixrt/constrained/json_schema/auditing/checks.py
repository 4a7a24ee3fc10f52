"""What is left to a check, on which values, and against which schema?

A check stands on the smallest value that every answer reaches on the same path: through properties, items
and additional properties, but never through an ``anyOf`` or a reference back to where it came from.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import SpanCheck
from radixrt.constrained.json_schema.auditing.walk import (
    Node,
    Place,
    at,
    children,
    escape,
    reference_target,
)
from radixrt.constrained.json_schema.ecma_regex import UnknownSyntax
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.python_regex import python_pattern

Faults = dict[Place, tuple[str, ...]]
"""Keywords that no grammar enforces, by the place of their node."""

MOST_CHECKS = 100
"""A schema with more (definitions used in many places multiply) is checked as a whole."""

_READ_ALIKE = (
    r"\A(?:[^\\(]|\\[bBdDwWsStnrfv0-9^$\\.*+?()\[\]{}|/\-]|\((?!\?)|\(\?(?:[:=!]|<[=!]))*\Z"
)
"""Regular expressions without what Python reads and ECMA-262 does not; whether they are well-formed, jsonschema says."""


def place_checks(schema: Any, normalised: Any, faults: Faults) -> tuple[SpanCheck, ...]:
    """Checks that together cover all faults of a schema, which was made from the normalised one.

    Raises:
        CannotEnforce: a keyword under a check can't be checked either.
    """
    placing = _Placing(schema, normalised, faults)
    checks = tuple(itertools.islice(placing.below((), (), frozenset()), MOST_CHECKS + 1))
    return checks if len(checks) <= MOST_CHECKS else (placing.check((), ()),)


@dataclass
class _Placing:
    schema: Any
    """In which the faults were found."""
    normalised: Any
    """From which the checks are cut; same places, but for those below ``patternProperties``."""
    faults: Faults
    _under: dict[Place, set[Place]] = field(default_factory=dict)

    def below(
        self, place: Place, path: tuple[str | None, ...], behind: frozenset[Place]
    ) -> Iterator[SpanCheck]:
        """Checks of the values at ``path``, whose schema is at ``place``, reached through the references ``behind``."""
        if not self.faults_under(place):
            return
        node = at(self.schema, place)
        target = reference_target(node)
        if target is not None and len(_acting(node)) == 1 and target not in behind:
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
        if target is not None and self.faults_under(target):
            return True
        for _, under, child in children(node):
            back = reference_target(child) in behind
            if (under not in below or back) and self.faults_under(place + under):
                return True
        return False

    def faults_under(self, place: Place) -> set[Place]:
        """Places of the faults that a value there can meet."""
        if place not in self._under:
            self._under[place] = self._search(place)
        return self._under[place]

    def _search(self, place: Place) -> set[Place]:
        found: set[Place] = set()
        waiting, seen = [place], set()
        while waiting:
            here = waiting.pop()
            if here in seen:
                continue
            seen.add(here)
            if here in self.faults:
                found.add(here)
            node = at(self.schema, here)
            waiting += [here + path for _, path, _ in children(node)]
            if (target := reference_target(node)) is not None:
                waiting.append(target)
        return found

    def check(self, place: Place, path: tuple[str | None, ...]) -> SpanCheck:
        node = at(self.normalised, place)
        found = self.faults_under(place)
        return SpanCheck(
            path=path,
            schema=self_contained(self.normalised, node),
            pointer=node.get(ORIGIN, "") if isinstance(node, dict) else "",
            keywords=tuple(sorted({keyword for p in found for keyword in self.faults[p]})),
        )


def _acting(node: Node) -> list[str]:
    return [keyword for keyword in node if keyword not in (ORIGIN, "$defs")]


def _unconditional(node: Any) -> Iterator[tuple[Place, str | None]]:
    """Subschemas that every part at one step of the path is held to, with the step."""
    if not isinstance(node, dict):
        return
    for name in node.get("properties", {}):
        yield ("properties", name), name
    if "items" in node and not node.get("prefixItems"):
        yield ("items",), None
    others = "additionalProperties" in node
    if (
        others
        and not node.get("properties")
        and not node.get("patternProperties")
        and "items" not in node
    ):
        yield ("additionalProperties",), None


# ---------------------------------------------------------------- what a validator is given


def self_contained(schema: Any, node: Any) -> Any:
    """The node as a schema of its own, in the words of a validator in Python; needed definitions come along.

    Raises:
        CannotEnforce: it holds a keyword that can't be checked.
    """
    result = checkable(node)
    if not isinstance(result, dict):
        return result
    names = _definitions_under(schema, node)
    result.pop("$defs", None)
    if names:
        result["$defs"] = {name: checkable(schema["$defs"][name]) for name in sorted(names)}
    return result


def _definitions_under(schema: Any, node: Any) -> set[str]:
    names: set[str] = set()
    waiting = [node]
    while waiting:
        here = waiting.pop()
        waiting += [child for _, _, child in children(here)]
        target = reference_target(here)
        if target is None:
            continue
        if len(target) != 2 or target[0] != "$defs":
            raise CannotEnforce(
                "$ref", here.get(ORIGIN, ""), "it leads to no definition under $defs."
            )
        if target[1] not in names:
            names.add(str(target[1]))
            waiting.append(schema["$defs"][target[1]])
    return names


def checkable(node: Any) -> Any:
    """A copy without origins in which patterns are Python's, and formats are asserted by patterns.

    Raises:
        CannotEnforce: a pattern is not one, or nothing knows what a format allows.
    """
    if not isinstance(node, dict):
        return node
    result = {keyword: value for keyword, value in node.items() if keyword != ORIGIN}
    origin = node.get(ORIGIN, "")
    for keyword, path, child in children(node):
        if len(path) == 1:
            result[keyword] = checkable(child)
        else:
            result[keyword] = (
                result[keyword].copy() if result[keyword] is node[keyword] else result[keyword]
            )
            result[keyword][path[1]] = checkable(child)
    if "pattern" in node:
        result["pattern"] = _pattern(node["pattern"], f"{origin}/pattern")
    if "patternProperties" in node:
        result["patternProperties"] = {
            _pattern(p, f"{origin}/patternProperties/{escape(p)}"): s
            for p, s in result["patternProperties"].items()
        }
    if "format" in node:
        _assert_format(result, origin)
    return result


def _pattern(pattern: str, pointer: str) -> str:
    try:
        return python_pattern(pattern)
    except UnknownSyntax as error:
        raise CannotEnforce(
            "pattern", pointer, f"{error}. Write it in plainer ECMA-262 syntax."
        ) from error


def _assert_format(node: Node, origin: str) -> None:
    name = node["format"]
    if name not in DEFINED:
        del node["format"]
        return
    pattern = format_pattern(name)
    if pattern is not None:
        asserted: Node = {"pattern": python_pattern(pattern)}
        if name in LENGTHS:
            asserted["maxLength"] = LENGTHS[name]
        node["allOf"] = [*node.get("allOf", ()), asserted]
    elif name == "regex":
        node["allOf"] = [*node.get("allOf", ()), {"pattern": _READ_ALIKE}]
    else:
        raise CannotEnforce(
            "format", f"{origin}/format", f"nothing here knows what {name!r} allows; leave it out."
        )
