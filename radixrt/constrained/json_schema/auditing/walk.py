"""Where are the subschemas of a node, and where does a ``$ref`` lead?

A subschema's place is the path of keys from the root, e.g. ``("properties", "a", "items")``.
"""

from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]
Node = dict[str, Any]

_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")
_OF_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_OF_ONE = (
    "items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip

DEFINITIONS = "#/$defs/"


def children(node: Any) -> Iterator[tuple[str, Place, Any]]:
    """(keyword, path from the node, subschema) of each subschema but the definitions."""
    if not isinstance(node, dict):
        return
    for keyword in node:
        value = node[keyword]
        if keyword in _OF_NAMES:
            yield from ((keyword, (keyword, name), value[name]) for name in value)
        elif keyword in _OF_LISTS:
            yield from ((keyword, (keyword, index), each) for index, each in enumerate(value))
        elif keyword in _OF_ONE:
            yield keyword, (keyword,), value


def target_of(reference: str) -> Place | None:
    """The place that a local ``$ref`` names; None for any other reference."""
    if not reference.startswith("#"):
        return None
    parts = [unescape(part) for part in reference[1:].split("/")[1:]]
    return tuple(
        int(part) if part.isdecimal() and before in _OF_LISTS else part
        for before, part in zip(["", *parts], parts, strict=False)
    )


def unescape(part: str) -> str:
    """A part of a JSON pointer, as the key that it stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def escape(part: str | int) -> str:
    """A key, as a part of a JSON pointer."""
    return str(part).replace("~", "~0").replace("/", "~1")


def pointer_of(place: Place) -> str:
    """The JSON pointer of a place."""
    return "".join("/" + escape(part) for part in place)


def at(schema: Any, place: Place) -> Any:
    """The subschema at a place.

    Raises:
        LookupError: there is none.
    """
    for part in place:
        try:
            schema = schema[part]
        except (TypeError, IndexError) as error:
            raise LookupError(pointer_of(place)) from error
    return schema


def reachable(schema: Any) -> Iterator[tuple[Place, Any]]:
    """Each subschema that an instance can meet, once, with its place; those behind references included."""
    waiting: list[Place] = [()]
    seen: set[Place] = set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        node = at(schema, place)
        yield place, node
        waiting += reversed([place + path for _, path, _ in children(node)])
        target = reference_target(node)
        if target is not None:
            waiting.append(target)


def reference_target(node: Any) -> Place | None:
    """Where the node's ``$ref`` leads."""
    return target_of(node["$ref"]) if isinstance(node, dict) and "$ref" in node else None


def recursive_targets(schema: Any) -> set[Place]:
    """The targets of references from which one comes back to them."""
    edges: dict[Place, set[Place]] = {}
    for place, node in reachable(schema):
        if (target := reference_target(node)) is not None:
            edges.setdefault(place, set()).add(target)
    targets = {target for each in edges.values() for target in each}
    inside = {
        t: {r for place, each in edges.items() if place[: len(t)] == t for r in each}
        for t in targets
    }
    return {target for target in targets if target in _closure(target, inside)}


def _closure(start: Place, edges: dict[Place, set[Place]]) -> set[Place]:
    found: set[Place] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting += edges.get(place, ())
    return found
