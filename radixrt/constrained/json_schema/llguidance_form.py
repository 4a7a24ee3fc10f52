"""Writes a schema for llguidance, in the only form in which the library was measured.

Annotations and unknown keywords are removed (the library acts on the key ``x-guidance``), patterns
are written portably, and formats that it does not enforce exactly become patterns that it does.
"""

from typing import Any

from radixrt.constrained.json_schema.enforced import (
    CONSTRAINING,
    EXACT_FORMATS,
    acts,
    is_writable,
    types_of,
)
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern
from radixrt.constrained.json_schema.keywords import ORIGIN, TYPE_OF, Node, mapped
from radixrt.constrained.json_schema.patterns import UnknownSyntax, is_whole, portable

_KEPT = CONSTRAINING | {"$defs", ORIGIN}
_DEPENDENT = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that say nothing without another one."""
_UNKNOWN = frozenset(
    ("contains", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems")
)  # fmt: skip
"""Keywords because of which llguidance refuses a schema, also where they say nothing."""


def in_llguidance_form(schema: Any) -> Any:
    """A copy for llguidance; every subschema stays at its place."""
    if isinstance(schema, bool):
        return {} if schema else False
    kept = {
        keyword: value
        for keyword, value in schema.items()
        if keyword in _KEPT and not _says_nothing(keyword, schema)
    }
    node = mapped(kept, lambda _, child: in_llguidance_form(child))
    if not _keep_writable_values(node):
        return False
    _write_patterns(node)
    _write_format(node)
    return node


def _says_nothing(keyword: str, node: Node) -> bool:
    if keyword in _DEPENDENT:
        return _DEPENDENT[keyword] not in node
    is_unknown = keyword in _UNKNOWN
    return is_unknown and (TYPE_OF[keyword] not in types_of(node) or not acts(keyword, node))


def _keep_writable_values(node: Node) -> bool:
    """Take out values with control characters, which can't be written; False if none is left."""
    if "enum" in node:
        node["enum"] = [value for value in node["enum"] if is_writable(value)]
    return bool(node.get("enum", True)) and is_writable(node.get("const"))


def _write_patterns(node: Node) -> None:
    if "pattern" in node:
        node["pattern"] = _portable_or_same(node["pattern"])
    if "patternProperties" in node:
        is_only_rule = (
            len(node["patternProperties"]) == 1 and node.get("additionalProperties") is False
        )
        written = {
            _portable_or_same(p, may_leave_out=is_only_rule): s
            for p, s in node["patternProperties"].items()
        }
        if len(written) == len(node["patternProperties"]):
            node["patternProperties"] = written


def _portable_or_same(pattern: str, *, may_leave_out: bool = True) -> str:
    """A pattern without a portable form stays, and is found not to be enforced.

    Args:
        may_leave_out: the form may match less. Not so where another rule holds for names that do
            not match.
    """
    try:
        return portable(pattern) if may_leave_out or is_whole(pattern) else pattern
    except UnknownSyntax:
        return pattern


def _write_format(node: Node) -> None:
    name = node.get("format")
    if name is None:
        return
    if name not in DEFINED or "string" not in types_of(node):
        del node["format"]
        return
    pattern = format_pattern(name)
    alone = not any(keyword in node for keyword in ("pattern", "minLength", "maxLength"))
    if pattern is None or (name in EXACT_FORMATS and alone):
        return
    del node["format"]
    if name in LENGTHS:
        node["maxLength"] = min(node.get("maxLength", LENGTHS[name]), LENGTHS[name])
    written = portable(pattern)
    if "pattern" in node:
        node.setdefault("allOf", []).append({"pattern": written, ORIGIN: node.get(ORIGIN, "")})
    else:
        node["pattern"] = written
