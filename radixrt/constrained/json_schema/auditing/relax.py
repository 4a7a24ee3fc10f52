"""Removes a keyword from a node: returns a superset of the node that a grammar can enforce."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from radixrt.constrained.json_schema.walk import Node

_TAKEN_ALONG = {
    "prefixItems": ("items", "unevaluatedItems"),
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
    "$ref": ("unevaluatedItems", "unevaluatedProperties"),
    "anyOf": ("unevaluatedItems", "unevaluatedProperties"),
    "allOf": ("unevaluatedItems", "unevaluatedProperties"),
    "dependentSchemas": ("unevaluatedProperties",),
}
"""Keywords that depend on another keyword: without it they would forbid more than before."""

MIN_MISSED = (
    "not", "if", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
    "dependentRequired", "dependentSchemas", "propertyNames", "minProperties", "maxProperties", "multipleOf",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minimum", "maximum", "format", "pattern",
    "oneOf", "minItems", "maxItems", "patternProperties", "additionalProperties", "allOf", "anyOf", "$ref", "required",
    "prefixItems", "items", "const", "enum", "properties",
)  # fmt: skip
"""Order in which keywords are removed, where one of several has to be."""


def without(node: Node, keywords: Iterable[str]) -> Node:
    """A superset of the node that makes no use of these keywords; ``oneOf`` becomes ``anyOf``."""
    result = dict(node)
    for keyword in keywords:
        value = result.pop(keyword, None)
        for other in _TAKEN_ALONG.get(keyword, ()):
            result.pop(other, None)
        if keyword == "oneOf" and value is not None and "anyOf" not in result:
            result["anyOf"] = value
    return result


def fewest_to_drop(
    node: Node, suspects: Iterable[str], is_fine: Callable[[Any], bool], budget: int = 200
) -> tuple[str, ...] | None:
    """The smallest set of keywords without which the node is fine; None if it never is."""
    present = [keyword for keyword in MIN_MISSED if keyword in set(suspects)]
    for size in range(1, len(present) + 1):
        for keywords in itertools.combinations(present, size):
            budget -= 1
            if budget < 0:
                break
            if is_fine(without(node, keywords)):
                return keywords
    return tuple(present) if present and is_fine(without(node, present)) else None
