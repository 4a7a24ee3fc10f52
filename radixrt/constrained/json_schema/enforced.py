"""Lists what llguidance was measured to enforce; all else is left to a check, or refused.

A *use* is named by a group and the words that act together in it, such as
``string/minLength+pattern``: keywords of one type of value, in the variants that the library was
seen to treat differently (``minProperties:many``). No invalid value got through in any probe of the
listed uses (``tests/constrained/probes``, which the tests send through the installed library). A
use that is not listed is never assumed to be enforced.
"""

import functools
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from radixrt.constrained.json_schema.formats import DEFINED
from radixrt.constrained.json_schema.keywords import OF_TYPE, ORIGIN, PLACE, TYPE_OF, TYPES
from radixrt.constrained.json_schema.patterns import (
    Assertion,
    Backreference,
    CharacterSet,
    Close,
    Dot,
    Open,
    Or,
    Repeat,
    Token,
    UnknownSyntax,
    parse,
)

LOGIC = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else")
CONSTRAINING = frozenset(("type", *LOGIC, *TYPE_OF))
"""Every keyword that allows or forbids something; others are annotations or hold definitions."""
EXACT_FORMATS = frozenset(("duration", "email", "ipv4", "uri", "uuid"))
"""Formats that llguidance takes as they are; the others are written as patterns."""
EXACT_INTEGERS = 2**53
"""Numbers from here on are a variant of their own: engines that compute in float64 round them."""
LONG_REPEAT = 1000
"""Repetitions beyond this are named apart: engines limit the size of their automata."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_NUMBERS = frozenset(
    (
        *_BOUNDS,
        *(f"{bound}:{variant}" for bound in _BOUNDS for variant in ("fraction", "tiny")),
        "maximum:huge",
        "exclusiveMaximum:huge",
    )
)
_OF_PATTERNS = frozenset(
    (
        "literal", "alternation", "anchor", "anchor-inside", "class", "negated-class", "dot", "group", "lazy", "repeat", "long-repeat", "property",
        "escape-d", "escape-D", "escape-s", "escape-S", "escape-w", "escape-W", "character-beyond-ascii", "character-control",
    )
)  # fmt: skip
_NAMES = frozenset(("name:control", "name:escaped"))
_ENFORCED: dict[str, frozenset[str]] = {
    "any": frozenset(
        ("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "siblings", "type", "empty", "false", "type:missing", "type:several")
    ),
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("prefixItems", "items", "items:false", "minItems", "maxItems")),
    "object": frozenset(
        ("properties", "required", "required:undeclared", "additionalProperties", "additionalProperties:false", "patternProperties",
         "minProperties:one", "minProperties:many", "maxProperties")
    ),
    "properties": _NAMES,
    "required": _NAMES,
    "pattern": _OF_PATTERNS,
    "patternProperties": _OF_PATTERNS | {"several"},
    "format": EXACT_FORMATS | {"ipv6"},
    "value": frozenset(
        ("null", "boolean", "number", "number:fraction", "number:tiny", "string", "string:escaped", "empty", "array", "object", "object:escaped")
    ),
}  # fmt: skip
"""The words of each group that may act together."""


class Use(NamedTuple):
    """A use of keywords in one node."""

    name: str
    keywords: tuple[str, ...]
    """The keywords of the node without which there is no such use."""


def is_enforced(use: str) -> bool:
    """Whether llguidance was measured to enforce a use.

    >>> is_enforced("string/minLength+pattern"), is_enforced("array/uniqueItems")
    (True, False)
    """
    group, _, rest = use.partition("/")
    words = frozenset(filter(None, rest.split("+")))
    if group not in _ENFORCED or not words <= _ENFORCED[group]:
        return False
    if group == "string":
        return "format" not in words or len(words) == 1
    return group != "object" or _are_counts_enforced(words)


def _are_counts_enforced(words: frozenset[str]) -> bool:
    """Whether llguidance counts the properties of an object with these keywords: it does so only
    where it need not count kinds of them."""
    counts = words & {"minProperties:one", "minProperties:many", "maxProperties"}
    if not counts:
        return True
    if "properties" not in words:
        return "minProperties:many" not in counts or "required:undeclared" in words
    if "additionalProperties:false" in words and "patternProperties" not in words:
        return "minProperties:many" not in counts or "required" in words
    return counts == {"minProperties:one"} and bool(words & {"required", "required:undeclared"})


def unenforced_uses(node: Any) -> tuple[Use, ...]:
    """The uses in a node that the grammar does not enforce. Its subschemas have their own."""
    if isinstance(node, dict) and not node.keys() & {"enum", "const"}:  # 1 and true are equal keys
        words = tuple((word, node[word]) for word in node if word not in (ORIGIN, PLACE))
        if all(isinstance(value, str | int | float) for _, value in words):
            return _unenforced_of_scalars(words)
    return tuple(use for use in uses_in(node) if not is_enforced(use.name))


@functools.lru_cache(maxsize=4096)
def _unenforced_of_scalars(words: tuple[tuple[str, str | float], ...]) -> tuple[Use, ...]:
    return tuple(use for use in uses_in(dict(words)) if not is_enforced(use.name))


def uses_in(node: Any) -> Iterator[Use]:
    """The uses of keywords in a node itself."""
    if isinstance(node, bool):
        yield Use("any/true" if node else "any/false", ())
        return
    types, has_keyword = types_of(node), False
    for type_name in types:
        words = OF_TYPE.get("number" if type_name == "integer" else type_name, ())
        present = tuple(keyword for keyword in words if acts(keyword, node))
        has_keyword = has_keyword or bool(present)
        together = "+".join(keyword + _variant(keyword, node) for keyword in present)
        yield Use(f"{type_name}/{together}", present)
        for keyword in present:
            for name in _inside(type_name, keyword, node):
                yield Use(name, (keyword,))
    if "type" not in node and has_keyword:
        yield Use("any/type:missing", ())
    elif "type" in node and len(types) > 1:
        yield Use("any/type:several", ())
    yield from _uses_of_logic(node)


def constraining(node: Any) -> list[str]:
    """The keywords of a node that allow or forbid something, in their order; a boolean has none."""
    return (
        [] if isinstance(node, bool) else [keyword for keyword in node if keyword in CONSTRAINING]
    )


def types_of(node: dict[str, Any]) -> tuple[str, ...]:
    """The types that the node names, or all."""
    named = node.get("type", TYPES)
    return (named,) if isinstance(named, str) else tuple(named)


def acts(keyword: str, node: dict[str, Any]) -> bool:
    """Whether a keyword is there and says something with its value."""
    if keyword not in node:
        return False
    value = node[keyword]
    match keyword:
        case "minItems" | "minLength" | "minProperties":
            return bool(value != 0)
        case "required" | "properties" | "patternProperties" | "dependentRequired" | "prefixItems":
            return bool(value)
        case "additionalProperties" | "items":
            return value is False or bool(constraining(value))
        case "format":
            return value in DEFINED
        case "uniqueItems":
            return value is True
    return True


def _variant(keyword: str, node: dict[str, Any]) -> str:
    value = node[keyword]
    match keyword:
        case "minProperties":
            return ":one" if value == 1 else ":many"
        case "additionalProperties" | "items" if value is False:
            return ":false"
        case "required" if not all(name in node.get("properties", {}) for name in value):
            return ":undeclared"
    return ""


def _inside(type_name: str, keyword: str, node: dict[str, Any]) -> Iterator[str]:
    """The names of the uses within the value of a keyword."""
    value = node[keyword]
    if keyword == "pattern":
        yield from (f"pattern/{name}" for name in pattern_constructs(value))
    elif keyword == "format":
        yield f"format/{value}"
    elif keyword == "patternProperties":
        names = {name for pattern in value for name in pattern_constructs(pattern)}
        yield from (f"patternProperties/{name}" for name in sorted(names))
        if any(name.startswith("escape-") for name in names):  # the others were spelled out
            yield "patternProperties/not-whole"
        if len(value) > 1:
            yield "patternProperties/several"
    elif TYPE_OF[keyword] == "number":
        if variant := number_variant(value):
            yield f"{type_name}/{keyword}:{variant}"
        elif type_name == "number" and _is_near_another(keyword, node):
            yield f"{type_name}/{keyword}:near"
    elif keyword in ("properties", "required"):
        kinds = {_kind_of_text(name).partition(":")[2] for name in value}
        yield from (f"{keyword}/name:{kind}" for kind in sorted(kinds - {""}))


def _is_near_another(keyword: str, node: dict[str, Any]) -> bool:
    """Whether this is an open bound and another one is less than one away, as 0.5 is from 0."""
    return keyword.startswith("exclusive") and any(
        0 < abs(node[other] - node[keyword]) < 1 for other in _BOUNDS[:4] if other in node
    )


def number_variant(value: float) -> str:
    """How hard a bound is: empty for small integers, else ``fraction``, ``tiny`` or ``huge``."""
    if (isinstance(value, float) and not math.isfinite(value)) or abs(value) >= EXACT_INTEGERS:
        return "huge"
    if value == int(value):
        return ""
    is_short = len(repr(abs(value)).replace(".", "")) <= 9 and "e" not in repr(value)
    return "fraction" if is_short else "tiny"


# ---------------------------------------------------------------- keywords of all types


def _uses_of_logic(node: dict[str, Any]) -> Iterator[Use]:
    present = [keyword for keyword in LOGIC if keyword in node]
    others = [k for k in node if k == "type" or (k in TYPE_OF and acts(k, node))]
    for keyword in present:
        if keyword in ("then", "else"):
            continue
        if of_values := keyword in ("enum", "const"):
            values = node["enum"] if keyword == "enum" else [node["const"]]
            kinds = sorted({kind for value in values for kind in _kinds(value)})
            yield from (Use(f"value/{kind}", (keyword,)) for kind in kinds)
        is_alone = len(present) == 1 and others in ([], ["type"] if of_values else [])
        beside = ("+type" if others else "") if is_alone else "+siblings"
        yield Use(f"any/{keyword}{beside}", (keyword,))


def _kinds(value: Any) -> Iterator[str]:
    """The kinds of a value and of all values in it."""
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
            return "number:vast"  # not listed: libraries write the nearest float, another number
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
    """What serde_json, with which llguidance reads a schema twice, makes of the shortest digits of
    a number: it divides or multiplies them by a power of ten, and both may be rounded."""
    _, digits, exponent = Decimal(repr(abs(value))).as_tuple()
    assert isinstance(exponent, int)
    read = float(int("".join(map(str, digits))))
    while exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    power = float(f"1e{abs(exponent)}")
    return math.copysign(read / power if exponent < 0 else read * power, value)


def _kind_of_text(text: str) -> str:
    """``string`` if JSON writes the text without an escape."""
    escaped = [c for c in text if c < " " or c in '"\\\x7f']
    if not escaped:
        return "string"
    return "string:control" if any(c not in '\n\r\t\b\f"\\' for c in escaped) else "string:escaped"


# ---------------------------------------------------------------- constructs of a pattern

_GROUPS = {
    "": "group", "?:": "group", "?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def pattern_constructs(pattern: str) -> frozenset[str]:
    """The constructs of a pattern, by name; ``unknown-syntax`` alone where it can't be read."""
    try:
        tokens = parse(pattern)
    except UnknownSyntax:
        return frozenset({"unknown-syntax"})
    found, depth = {"literal"}, 0
    for before, token, after in zip([Or(), *tokens], tokens, [*tokens[1:], Or()], strict=False):
        depth += isinstance(token, Open) - isinstance(token, Close)
        if token in (Assertion("^"), Assertion("$")):
            beside = before if token == Assertion("^") else after
            is_at_edge = depth == 0 and isinstance(beside, Or)
            found.add("anchor" if is_at_edge else "anchor-inside")
        found.update(_constructs(token))
    return frozenset(found)


def _constructs(token: Token) -> Iterator[str]:
    match token:
        case Or():
            yield "alternation"
        case Dot():
            yield "dot"
        case Assertion("\\b" | "\\B"):
            yield "word-boundary"
        case Backreference():
            yield "backreference"
        case Open(kind):
            yield _GROUPS[kind]
        case CharacterSet():
            yield from _constructs_of_set(token)
        case Repeat(least, most, lazy):
            yield "lazy" if lazy else "repeat"
            if max(least, most or 0) > LONG_REPEAT:
                yield "long-repeat"


def _constructs_of_set(token: CharacterSet) -> Iterator[str]:
    if token.is_class or isinstance(token.items[0], str):
        yield "negated-class" if token.negated else "class"
    if not token.items:
        yield "empty-class"
    for item in token.items:
        if isinstance(item, str):
            yield "property" if item[0] in "pP" else f"escape-{item}"
            if token.negated and item in "DWS":
                yield "negated-complement"  # has no portable form
        elif (
            len(token.items) == 1 and item[0] == item[1] < 0x20 and chr(item[0]) not in "\b\t\n\f\r"
        ):
            yield "character-unwritable"
        elif item[0] < 0x20:
            yield "character-control"
        elif item[1] > 0x7E:
            yield "character-beyond-ascii"
