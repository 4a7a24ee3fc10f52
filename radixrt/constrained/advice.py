"""The advice on a constraint: what a grammar enforces exactly, what is checked afterwards, what is
slow, and what would help."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from radixrt.base.errors import RequestError
from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import Unenforced

SLOW_COMPILE_MS = 100.0
SLOW_MASK_MS = 2.0
"""All answers of a step wait for its masks."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A keyword that no grammar enforces."""

    keyword: str
    pointer: str
    """JSON pointer into the schema that the user sent."""
    message: str
    advice: str
    """The rewriting that a grammar enforces."""


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the work with a constraint that takes long."""

    step: Literal["compile", "mask"]
    ms: float
    """CPU time."""
    pointer: str
    """Place of the likeliest cause in the schema; empty for the whole."""
    message: str
    advice: str


class Advice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one constraint."""

    ok: bool
    """Requests with it are taken."""
    backend: str | None
    """The library of the grammar; None if there is no grammar."""
    exact: bool
    """The grammar alone enforces the whole constraint."""
    checked: tuple[Finding, ...]
    """Keywords that a validator checks as soon as their value is complete."""
    unenforced: tuple[Finding, ...]
    """Keywords that nothing enforces; only with ``strict`` false."""
    slow: tuple[SlowStep, ...]
    compile_ms: float
    """CPU time of the compilation."""
    mask_ms: float
    """CPU time of the slowest mask of some random answers."""
    error: Finding | None = None
    """Why it is not ``ok``."""


_ONE_PATTERN = "Write one pattern for all conditions on the text, and no length beside it."
_BOUNDS = "Take bounds between -1e15 and 1e15, or leave the bound out."

REWRITINGS: dict[str, str] = {
    "allOf": _ONE_PATTERN,
    "contains": (
        'Put the item that must be there first: {"prefixItems": [the schema of contains], "items": the schema of the others, '
        '"minItems": 1}.'
    ),
    "exclusiveMaximum": _BOUNDS,
    "exclusiveMinimum": _BOUNDS,
    "format": "Write a pattern of the texts in place of the format.",
    "if": (
        "Write anyOf with one object for each case, each with a const of its own in the required property that tells the "
        "cases apart."
    ),
    "maximum": _BOUNDS,
    "maxLength": _ONE_PATTERN,
    "maxProperties": 'List the properties that there must be in required, and add "additionalProperties": false.',
    "minimum": _BOUNDS,
    "minLength": _ONE_PATTERN,
    "minProperties": 'Add "additionalProperties": false, or list the properties that there must be in required.',
    "not": "Say which values are allowed: by enum, type, bounds, or a pattern of the allowed texts.",
    "oneOf": "Give each branch a required property with a const of its own. If a value may satisfy several branches, write anyOf.",
    "pattern": "Write it without lookahead, lookbehind and word borders, with ^ at its beginning and $ at its end.",
    "patternProperties": "Let no name match two of the patterns, as ^a and ^b; or declare the names in properties.",
    "propertyNames": 'Write patternProperties with one pattern of the names, and "additionalProperties": false.',
    "unevaluatedItems": "Write prefixItems and items into one schema, without unevaluatedItems.",
    "unevaluatedProperties": 'Declare all properties in one object, with "additionalProperties": false.',
    "uniqueItems": (
        "A grammar does not know the items before. Where the items are known texts, take an object with a property for each: "
        '{"type": "object", "properties": {"red": {"const": true}, "blue": {"const": true}}, "additionalProperties": false}.'
    ),
}  # fmt: skip
"""The form that a grammar enforces, for each keyword."""

_SIMPLER = "Write it with fewer keywords in one place: type, properties, items, enum, anyOf, pattern and bounds are exact."


def finding(left: Unenforced, then: str) -> Finding:
    """The finding about a keyword that the grammar leaves out.

    Args:
        then: what happens instead.
    """
    return Finding(
        keyword=left.keyword,
        pointer=left.pointer,
        message=f"No grammar enforces it here; {then} ({left.reason}).",
        advice=REWRITINGS.get(left.keyword, _SIMPLER),
    )


def slow_steps(
    schema: str | None, compile_ms: float, mask_ms: float, before: str, has_findings: bool
) -> Iterator[SlowStep]:
    """The steps that take longer than they should, with their likeliest cause.

    Args:
        schema: JSON text, if the constraint is one.
        before: text of the answer before the slowest mask.
        has_findings: the grammar leaves keywords out.
    """
    costly = max(_costly_parts(json.loads(schema), ""), default=None) if schema else None
    pointer, cause, advice = ("", "", "") if costly is None else costly[1:]
    if compile_ms > SLOW_COMPILE_MS:
        message = f"Compiling takes {compile_ms:.0f} ms"
        if has_findings:
            message += ", most of it to find the keywords that no grammar enforces"
            advice, pointer, cause = "Rewrite these keywords.", "", ""
        yield SlowStep(
            step="compile",
            ms=compile_ms,
            pointer=pointer,
            message=_because(message, cause),
            advice=advice or "Leave out definitions and annotations that are not needed.",
        )
    if mask_ms > SLOW_MASK_MS:
        message = f"The mask after {before[-40:]!r} takes {mask_ms:.1f} ms"
        yield SlowStep(
            step="mask",
            ms=mask_ms,
            pointer="" if costly is None else costly[1],
            message=_because(message, "" if costly is None else costly[2]),
            advice=_SIMPLER if costly is None else costly[3],
        )


def _because(message: str, cause: str) -> str:
    return f"{message}; the likeliest cause is {cause}." if cause else f"{message}."


_REPETITION = re.compile(r"\{\d*,?(\d+)\}")
_LOWER = "Lower the bound, or leave it out."


def _costly_parts(node: Any, pointer: str) -> Iterator[tuple[float, str, str, str]]:
    """The costliest parts of a schema: (times what is usual, pointer, what it is, advice)."""
    if isinstance(node, list):
        for index, each in enumerate(node):
            yield from _costly_parts(each, f"{pointer}/{index}")
    if not isinstance(node, dict):
        return
    if isinstance(pattern := node.get("pattern"), str):
        bounds = [int(found[1]) for found in _REPETITION.finditer(pattern)]
        most = max(bounds, default=0)
        yield most / 10, f"{pointer}/pattern", f"its repetition up to {most} times", (
            "Write * or + in place of the bound, or lower it."
        )  # fmt: skip
    for word, usual in (("minLength", 50), ("maxLength", 200), ("minItems", 50), ("maxItems", 100)):
        if isinstance(bound := node.get(word), int):
            yield bound / usual, f"{pointer}/{word}", f"the bound of {bound}", _LOWER
    if isinstance(values := node.get("enum"), list):
        yield len(values) / 1000, f"{pointer}/enum", f"its {len(values)} values", (
            "Shorten the list, or write a pattern of the values."
        )  # fmt: skip
    if isinstance(declared := node.get("properties"), dict):
        optional = len(declared.keys() - set(map(str, node.get("required") or ())))
        yield optional / 100, f"{pointer}/properties", f"its {optional} optional properties", (
            "List more properties in required, or divide the object."
        )  # fmt: skip
    for word, each in node.items():
        step = word.replace("~", "~0").replace("/", "~1")
        yield from _costly_parts(each, f"{pointer}/{step}")


def refused(error: RequestError, cause: CannotEnforce | None = None) -> Advice:
    """The advice on a constraint that can't be compiled.

    Args:
        cause: names the keyword of a schema.
    """
    keyword, pointer = (cause.keyword, cause.pointer) if cause else ("", "")
    return Advice(
        ok=False,
        backend=None,
        exact=False,
        checked=(),
        unenforced=(),
        slow=(),
        compile_ms=0.0,
        mask_ms=0.0,
        error=Finding(
            keyword=keyword,
            pointer=pointer,
            message=error.message,
            advice=cause.reason if cause else "",
        ),
    )
