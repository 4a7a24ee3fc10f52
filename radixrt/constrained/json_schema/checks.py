"""Places the checks of the keywords that a grammar does not enforce: on which values, against which
schema.

A check is placed on the smallest value that every answer reaches on the same path: through
properties, items and additional properties, but never through an ``anyOf`` or a reference to an
enclosing schema.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import SpanCheck
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern
from radixrt.constrained.json_schema.keywords import (
    ORIGIN,
    Node,
    Place,
    children,
    mapped,
    met_with,
    places_below,
    pointer_of,
    reference_target,
    subschema,
)
from radixrt.constrained.json_schema.patterns import UnknownSyntax, python_pattern

_READ_ALIKE = (
    r"\A(?:[^\\(]|\\[bBdDwWsStnrfv0-9^$\\.*+?()\[\]{}|/\-]|\((?!\?)|\(\?(?:[:=!]|<[=!]))*\Z"
)
"""Regular expressions in the syntax that Python and ECMA-262 share; jsonschema decides whether they
are well-formed."""


def checkable(node: Any) -> Any:
    """A copy without origins in which patterns are Python's, and formats are asserted by patterns.
    Raises CannotEnforce if a pattern is not well-formed, or the values of a format are not
    known."""
    if not isinstance(node, dict):
        return node
    origin = node.get(ORIGIN, "")
    result = mapped(node, lambda _, child: checkable(child))
    result.pop(ORIGIN, None)
    if "pattern" in result:
        result["pattern"] = _pattern(result["pattern"], f"{origin}/pattern")
    if "patternProperties" in result:
        where = f"{origin}/patternProperties"
        result["patternProperties"] = {
            _pattern(pattern, where + pointer_of([pattern])): schema
            for pattern, schema in result["patternProperties"].items()
        }
    if "format" in result:
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
    pattern = _READ_ALIKE if name == "regex" else format_pattern(name)
    if pattern is None:
        raise CannotEnforce(
            "format", f"{origin}/format", f"the format {name!r} is not supported; leave it out."
        )
    asserted: Node = {"pattern": pattern if name == "regex" else python_pattern(pattern)}
    if name in LENGTHS:
        asserted["maxLength"] = LENGTHS[name]
    node["allOf"] = [*node.get("allOf", ()), asserted]


KeywordsByPlace = dict[Place, tuple[str, ...]]
"""Keywords that the grammar does not enforce, by the place of their node."""

MAX_CHECKS = 100
"""A schema with more (definitions used in many places multiply) is checked as a whole."""


def place_checks(
    schema: Any, normal_form: Any, unenforced: KeywordsByPlace
) -> tuple[SpanCheck, ...]:
    """Checks that together cover all unenforced keywords of a schema, which was made from the
    normal form. Raises CannotEnforce if a keyword under a check can't be checked either."""
    placing = _Placing(schema, normal_form, unenforced)
    checks = tuple(itertools.islice(placing.below((), (), frozenset()), MAX_CHECKS + 1))
    return checks if len(checks) <= MAX_CHECKS else (placing.check((), ()),)


@dataclass
class _Placing:
    schema: Any
    """The schema for llguidance, in which the keywords are unenforced."""
    normal_form: Any
    """The schema of which the checks are parts; same places, but for those below
    ``patternProperties``."""
    unenforced: KeywordsByPlace
    _under: dict[Place, set[Place]] = field(default_factory=lambda: defaultdict(set))
    """Places of the unenforced keywords that a value at a place can meet."""

    def __post_init__(self) -> None:
        leading_to: dict[Place, list[Place]] = defaultdict(list)
        for place, node in met_with(self.schema):
            for below in places_below(node, place):
                leading_to[below].append(place)
        for keyword_place in self.unenforced:
            waiting = [keyword_place]
            while waiting:
                place = waiting.pop()
                if keyword_place not in self._under[place]:
                    self._under[place].add(keyword_place)
                    waiting += leading_to[place]

    def below(
        self, place: Place, path: tuple[str | None, ...], behind: frozenset[Place]
    ) -> Iterator[SpanCheck]:
        """Checks of the values at ``path``, whose schema is at ``place``, reached through the
        references ``behind``."""
        if not self._under[place]:
            return
        node = subschema(self.schema, place)
        target = reference_target(node)
        if (
            target is not None
            and target not in behind
            and place not in self.unenforced
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
        """Whether an unenforced keyword is the node's own, or met only under some condition, or
        leads back here."""
        if place in self.unenforced:
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
        node = subschema(self.normal_form, place)
        found = self._under[place]
        return SpanCheck(
            path=path,
            schema=self_contained(self.normal_form, place),
            pointer=node.get(ORIGIN, "") if isinstance(node, dict) else "",
            keywords=tuple(sorted({keyword for p in found for keyword in self.unenforced[p]})),
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
    """The node at a place as a schema of its own, written for a validator in Python, with the
    definitions that it needs. Raises CannotEnforce if it holds a keyword that can't be checked."""
    node = subschema(schema, place)
    if not isinstance(node, dict):
        return node
    result = checkable({keyword: value for keyword, value in node.items() if keyword != "$defs"})
    names = {target[1] for _, node in met_with(schema, place) if (target := reference_target(node))}
    if names:
        result["$defs"] = {name: checkable(schema["$defs"][name]) for name in sorted(names)}
    return result
