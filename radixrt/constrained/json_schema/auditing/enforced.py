"""Lists the features that llguidance was measured to enforce; every other feature is left to a check, or refused.

No invalid value got through in any probe of them (``tests/constrained/probes``, which the tests send through the installed library). The names
are those of :mod:`radixrt.constrained.json_schema.auditing.features`: a group, and the words that act together in it.
"""

EXACT_FORMATS = frozenset(("duration", "email", "ipv4", "uri", "uuid"))
"""Formats that llguidance takes as they are; the others are written as patterns."""

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

_WORDS: dict[str, frozenset[str]] = {
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


def is_enforced(feature: str) -> bool:
    """Whether llguidance was measured to enforce a feature.

    >>> is_enforced("string/minLength+pattern"), is_enforced("array/uniqueItems")
    (True, False)
    """
    group, _, rest = feature.partition("/")
    words = frozenset(filter(None, rest.split("+")))
    if group not in _WORDS or not words <= _WORDS[group]:
        return False
    if group == "string":
        return "format" not in words or len(words) == 1
    return group != "object" or _are_counts_enforced(words)


def _are_counts_enforced(words: frozenset[str]) -> bool:
    """Of an object with these keywords: llguidance counts properties only where it need not count kinds of them."""
    counts = words & {"minProperties:one", "minProperties:many", "maxProperties"}
    if not counts:
        return True
    if "properties" not in words:
        return "minProperties:many" not in counts or "required:undeclared" in words
    if "additionalProperties:false" in words and "patternProperties" not in words:
        return "minProperties:many" not in counts or "required" in words
    return counts == {"minProperties:one"} and bool(words & {"required", "required:undeclared"})
