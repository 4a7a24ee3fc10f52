"""Names the keywords of JSON schema, walks subschemas, resolves ``$ref``, and compares JSON values.

A subschema's place is the path of keys from the root, e.g. ``("properties", "a", "items")``.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

ORIGIN = "$origin"
"""Private key of a normalised schema: JSON pointer, into the user's schema, of its origin."""
PLACE = "$place"
"""Private key of a schema that is made smaller: where each subschema was."""
NOT_IN = "$notIn"
"""Private key of the normaliser: the value is none of these (``not: {enum: ...}``)."""
NOT_INTEGER = "$notInteger"
"""Private key of the normaliser: the number has a fraction (``not: {type: integer}``)."""

TYPES = ("null", "boolean", "object", "array", "number", "string")
"""Every JSON value has exactly one of these; an integer is a number."""

OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": (
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", NOT_INTEGER,
    ),
    "array": (
        "prefixItems", "items", "minItems", "maxItems", "contains", "minContains", "maxContains", "uniqueItems",
        "unevaluatedItems",
    ),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
    ),
}  # fmt: skip
"""Keywords that say something about values of one type and nothing about others; uses of several
are named in this order."""

TYPE_OF = {keyword: kind for kind, words in OF_TYPE.items() for keyword in words}
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref")
"""Keywords that hold the same value to other schemas."""
ANY_TYPE = ("type", "enum", "const", NOT_IN)

SCHEMA_WORDS = (
    "items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    "not", "if", "then", "else",
)  # fmt: skip
"""Keywords whose value is a schema, ..."""
LIST_WORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""... a list of schemas, ..."""
MAP_WORDS = ("properties", "patternProperties", "dependentSchemas")
"""... schemas by name."""

Schema = dict[str, Any] | bool


def value_key(value: Any) -> Any:
    """Equal for values that JSON schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return ("array", *map(value_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, value_key(item)) for name, item in value.items()))
    return isinstance(value, bool), value  # Python compares and hashes 1 and 1.0 alike


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they first come."""
    found: dict[Any, Any] = {}
    for value in values:
        found.setdefault(value_key(value), value)
    return list(found.values())


def first_repeated(items: list[Any]) -> int | None:
    """Index of the first item that equals one before it."""
    seen = set()
    for index, item in enumerate(items):
        key = value_key(item)
        if key in seen:
            return index
        seen.add(key)
    return None


def type_of(value: Any) -> str:
    """The one of ``TYPES`` that a value has."""
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}  # fmt: skip
    return names.get(type(value), "object")


def is_integral(value: int | float) -> bool:
    """Whether a number is an integer in JSON schema's sense, as 1.0 is."""
    return isinstance(value, int) or value.is_integer()


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
