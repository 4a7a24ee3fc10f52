"""Lists the features that a backend must enforce to hold an answer to one node of a schema.

A feature is a name such as ``string/minLength+pattern``: keywords that act together on one type of value,
in the variants that backends were seen to treat differently (``minProperties:many``). The names are the keys of the
table of capabilities; a name that is not in the table is never assumed to be enforced.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from radixrt.constrained.json_schema.auditing.patterns import pattern_features
from radixrt.constrained.json_schema.formats import DEFINED
from radixrt.constrained.json_schema.keywords import OF_TYPE, TYPE_OF, TYPES

LOGIC = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else")

ENFORCEABLE = frozenset(("type", *LOGIC, *TYPE_OF))
"""Every keyword that allows or forbids something; all others are annotations or hold definitions."""

EXACT_INTEGERS = 2**53
"""Numbers from here on are a variant of their own: engines that compute in float64 round them."""


@dataclass(frozen=True)
class Feature:
    """One thing to enforce at one node."""

    name: str
    keywords: tuple[str, ...]
    """Of the node: those without which it need not be enforced."""


def constraints(node: Any) -> list[str]:
    """The keywords of a node that allow or forbid something, in their order; a boolean has none."""
    return [] if isinstance(node, bool) else [keyword for keyword in node if keyword in ENFORCEABLE]


def types_of(node: dict[str, Any]) -> tuple[str, ...]:
    """The types that the node names, or all."""
    named = node.get("type", TYPES)
    return (named,) if isinstance(named, str) else tuple(named)


def node_features(node: Any) -> list[Feature]:
    """Features of a node itself; its subschemas have their own."""
    if isinstance(node, bool):
        return [Feature("any/true" if node else "any/false", ())]
    return [*_of_types(node), *_of_logic(node)]


# ---------------------------------------------------------------- keywords of one type


def _of_types(node: dict[str, Any]) -> Iterator[Feature]:
    types = types_of(node)
    any_keyword = False
    for type_name in types:
        keywords = OF_TYPE.get("number" if type_name == "integer" else type_name, ())
        present = [keyword for keyword in keywords if acts(keyword, node)]
        any_keyword = any_keyword or bool(present)
        yield from _together(type_name, present, node)
    if "type" not in node:
        if any_keyword:
            yield Feature("any/type:missing", ())
    elif len(types) > 1:
        yield Feature("any/type:several", ())


def acts(keyword: str, node: dict[str, Any]) -> bool:
    """False for a keyword that says nothing with this value."""
    if keyword not in node:
        return False
    value = node[keyword]
    match keyword:
        case "minItems" | "minLength" | "minProperties":
            return value != 0
        case "required" | "properties" | "patternProperties" | "dependentRequired" | "prefixItems":
            return bool(value)
        case "additionalProperties" | "items":
            return value is not True and constraints_or_false(value)
        case "format":
            return value in DEFINED
        case "uniqueItems":
            return value is True
    return True


def constraints_or_false(schema: Any) -> bool:
    """Whether a schema forbids anything."""
    return not schema if isinstance(schema, bool) else bool(constraints(schema))


def _together(type_name: str, present: list[str], node: dict[str, Any]) -> Iterator[Feature]:
    """One feature for the keywords that act together, and more for their values."""
    if not present:
        yield Feature(f"{type_name}/", ())
        return
    names = [keyword + _variant(keyword, node) for keyword in present]
    yield Feature(f"{type_name}/{'+'.join(names)}", tuple(present))
    for keyword in present:
        yield from _inside(type_name, keyword, node)


def _variant(keyword: str, node: dict[str, Any]) -> str:
    value = node[keyword]
    match keyword:
        case "minProperties":
            return ":one" if value == 1 else ":many"
        case "additionalProperties" | "items" if value is False:
            return ":false"
        case "required":
            declared = node.get("properties", {})
            return "" if all(name in declared for name in value) else ":undeclared"
    return ""


def _inside(type_name: str, keyword: str, node: dict[str, Any]) -> Iterator[Feature]:
    value = node[keyword]
    if keyword == "pattern":
        yield from (Feature(f"pattern/{name}", ("pattern",)) for name in pattern_features(value))
    elif keyword == "format":
        yield Feature(f"format/{value}", ("format",))
    elif keyword == "patternProperties":
        names = {name for pattern in value for name in pattern_features(pattern)}
        yield from (Feature(f"patternProperties/{name}", (keyword,)) for name in sorted(names))
        if any(name.startswith("escape-") for name in names):  # prepare spells out the others
            yield Feature("patternProperties/not-whole", (keyword,))
        if len(value) > 1:
            yield Feature("patternProperties/several", (keyword,))
    elif TYPE_OF[keyword] == "number":
        variant = number_variant(value) or ("near" if _is_near(keyword, node) else "")
        if variant and (variant != "near" or type_name == "number"):
            yield Feature(f"{type_name}/{keyword}:{variant}", (keyword,))
    elif keyword in ("properties", "required"):
        kinds = {_kind_of_text(name).partition(":")[2] for name in value}
        for kind in sorted(kinds - {""}):
            yield Feature(f"{keyword}/name:{kind}", (keyword,))


def _is_near(keyword: str, node: dict[str, Any]) -> bool:
    """Whether this is an open bound and another one is less than one away, as 0.5 is from 0."""
    others = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return keyword.startswith("exclusive") and any(
        0 < abs(node[other] - node[keyword]) < 1 for other in others if other in node
    )


def number_variant(value: float) -> str:
    """How hard a bound is: empty for small integers, else ``fraction``, ``tiny`` or ``huge``."""
    if (isinstance(value, float) and not math.isfinite(value)) or abs(value) >= EXACT_INTEGERS:
        return "huge"
    if value == int(value):
        return ""
    return (
        "fraction"
        if len(repr(abs(value)).replace(".", "")) <= 9 and "e" not in repr(value)
        else "tiny"
    )


def _plain(text: str) -> bool:
    """Whether JSON writes the text without an escape."""
    return all(character >= " " and character not in '"\\\x7f' for character in text)


# ---------------------------------------------------------------- keywords of all types


def _of_logic(node: dict[str, Any]) -> Iterator[Feature]:
    present = [keyword for keyword in LOGIC if keyword in node]
    others = [
        k for k in node if k in ENFORCEABLE and k not in LOGIC and (k == "type" or acts(k, node))
    ]
    for keyword in present:
        if keyword in ("then", "else"):
            continue
        of_values = keyword in ("enum", "const")
        if of_values:
            yield from _of_values(keyword, node)
        alone = len(present) == 1 and others in ([], ["type"] if of_values else [])
        beside = "+type" if others else ""
        yield Feature(f"any/{keyword}{beside if alone else '+siblings'}", (keyword,))


def _of_values(keyword: str, node: dict[str, Any]) -> Iterator[Feature]:
    values = node["enum"] if keyword == "enum" else [node["const"]]
    for kind in sorted({kind for value in values for kind in _kinds(value)}):
        yield Feature(f"value/{kind}", (keyword,))


def _kinds(value: Any) -> Iterator[str]:
    """Of the value and of all in it."""
    yield _kind(value)
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _kinds(item)


def is_writable(value: Any) -> bool:
    """False if there are control characters in it that JSON writes only as ``\\u`` escapes."""
    return not any(kind.endswith(":control") for kind in _kinds(value))


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return _kind_of_text(value)
        case int() if not -(2**63) <= value < 2**63:
            return "number:vast"  # in no table: libraries write the nearest float, another number
        case float() if _read_by_serde(_read_by_serde(value)) != value:
            return "number:rounded"
        case int() | float():
            variant = number_variant(value)
            return f"number:{variant}" if variant else "number"
        case list() | dict() if not value:
            return "empty"
        case list():
            return "array"
        case dict():
            kinds = {_kind_of_text(name).partition(":")[2] for name in value} - {""}
            return f"object:{min(kinds)}" if kinds else "object"
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _read_by_serde(value: float) -> float:
    """What serde_json, which llguidance reads a schema with (twice), makes of the shortest digits of a number: it divides or multiplies
    them by a power of ten, and both may be rounded."""
    _, digits, exponent = Decimal(repr(abs(value))).as_tuple()
    assert isinstance(exponent, int)
    read = float(int("".join(map(str, digits))))
    while exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    power = float(f"1e{abs(exponent)}")
    return math.copysign(read / power if exponent < 0 else read * power, value)


def _kind_of_text(text: str) -> str:
    if _plain(text):
        return "string"
    controls = [c for c in text if c < " " or c == "\x7f"]
    return "string:control" if any(c not in "\n\r\t\b\f" for c in controls) else "string:escaped"
