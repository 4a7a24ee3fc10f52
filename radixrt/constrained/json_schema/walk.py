"""Lists the subschemas of a schema, and resolves ``$ref``.

A subschema's place is the path of keys from the root, e.g. ``("properties", "a", "items")``.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from radixrt.constrained.json_schema.keywords import (
    LIST_WORDS,
    MAP_WORDS,
    ORIGIN,
    PLACE,
    SCHEMA_WORDS,
)

Place = tuple[str | int, ...]
Node = dict[str, Any]
_HOLDS: dict[str, str] = {
    **dict.fromkeys((*MAP_WORDS, "$defs"), "map"),
    **dict.fromkeys(LIST_WORDS, "list"),
    **dict.fromkeys(SCHEMA_WORDS, "schema"),
}
"""What the value of a keyword is, of schemas."""


def children(node: Any) -> Iterator[tuple[Place, Any]]:
    """(path from the node, subschema) of each subschema but the definitions."""
    if not isinstance(node, dict):
        return
    for keyword, value in node.items():
        kind = _HOLDS.get(keyword)
        if kind is None:
            continue
        if kind == "schema":
            yield (keyword,), value
        elif kind == "list":
            yield from (((keyword, index), each) for index, each in enumerate(value))
        elif keyword != "$defs":
            yield from (((keyword, name), each) for name, each in value.items())


def mapped(node: Node, change: Callable[[Place, Any], Any]) -> Node:
    """A copy with what ``change`` makes of each subschema and its path, definitions included."""
    result = dict(node)
    for word, value in node.items():
        kind = _HOLDS.get(word)
        if kind is None:
            continue
        if kind == "schema":
            result[word] = change((word,), value)
        elif kind == "list":
            result[word] = [change((word, index), each) for index, each in enumerate(value)]
        else:
            result[word] = {name: change((word, name), each) for name, each in value.items()}
    return result


def without_origins(schema: Any) -> Any:
    """A copy without the private keys. A property of such a name stays: it is below
    ``properties``."""
    if not isinstance(schema, dict):
        return schema
    public = {word: value for word, value in schema.items() if word not in (ORIGIN, PLACE)}
    return mapped(public, lambda _, child: without_origins(child))


def values_in(value: Any) -> Iterator[Any]:
    """A JSON value and all values in it."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def pointer_of(place: Iterable[str | int]) -> str:
    """The JSON pointer of a place."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in place)


def subschema(schema: Any, place: Place) -> Any:
    """The subschema at a place."""
    for key in place:
        schema = schema[key]
    return schema


def holder(place: Place) -> Place:
    """The place of the node that holds the one at a place; the root's own."""
    start = end = 0
    while end < len(place):
        start, end = end, end + (1 if place[end] in SCHEMA_WORDS else 2)
    return place[:start]


def reference_target(node: Any) -> Place | None:
    """Where the ``$ref`` of a normalised node leads, if it has one: to a definition."""
    if not isinstance(node, dict) or "$ref" not in node:
        return None
    return "$defs", node["$ref"].removeprefix("#/$defs/")


def places_below(node: Any, place: Place) -> list[Place]:
    """The places of the target of a node's reference, and of the subschemas of the node."""
    target = reference_target(node)
    below = [place + path for path, _ in children(node)]
    return below if target is None else [target, *below]


def met_with(schema: Any, start: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Each subschema that an instance of the one at ``start`` can meet, once, with its place; those
    behind references included. A yielded subschema may be changed in place before the next."""
    waiting, seen = [start], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        node = subschema(schema, place)
        yield place, node
        waiting += reversed(places_below(node, place))
