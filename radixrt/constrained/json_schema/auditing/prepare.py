"""What does a backend get to see of a schema? Only what it is measured on, in the one form it is measured in.

Annotations and unknown keywords go (some libraries act on keys such as ``x-guidance``), patterns are written
portably, and formats that a backend does not enforce exactly become patterns that it does.
"""

from typing import Any

from radixrt.constrained.json_schema.auditing.capabilities import Capabilities, Verdict
from radixrt.constrained.json_schema.auditing.features import (
    ENFORCEABLE,
    UNREAD,
    is_writable,
    types_of,
)
from radixrt.constrained.json_schema.auditing.patterns import portable
from radixrt.constrained.json_schema.ecma_regex import UnknownSyntax
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern
from radixrt.constrained.json_schema.keywords import ORIGIN

_KEPT = ENFORCEABLE | UNREAD | {"$defs", ORIGIN}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs")
_SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_VALUES = ("enum", "const", "required", "dependentRequired", "type", "$ref", ORIGIN)


def prepared(schema: Any, backend: str, table: Capabilities) -> Any:
    """A copy for one backend; every subschema stays at its place."""
    if isinstance(schema, bool):
        return {} if schema else False
    node: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword not in _KEPT:
            continue
        if keyword in _SCHEMAS_BY_NAME:
            node[keyword] = {name: prepared(each, backend, table) for name, each in value.items()}
        elif keyword in _SCHEMA_LISTS:
            node[keyword] = [prepared(each, backend, table) for each in value]
        elif keyword not in _VALUES and isinstance(value, dict | bool) and keyword != "uniqueItems":
            node[keyword] = prepared(value, backend, table)
        else:
            node[keyword] = value
    if not _keep_writable_values(node, backend, table):
        return False
    _write_patterns(node)
    _write_format(node, backend, table)
    return node


def _keep_writable_values(node: dict[str, Any], backend: str, table: Capabilities) -> bool:
    """Take out values that the backend can't write anywhere, and gets wrong; False if none is left."""
    if table.verdict(backend, "value/string:control").enforced:
        return True
    if "enum" in node:
        node["enum"] = [value for value in node["enum"] if is_writable(value)]
    return bool(node.get("enum", True)) and is_writable(node.get("const"))


def _write_patterns(node: dict[str, Any]) -> None:
    if "pattern" in node:
        node["pattern"] = _portable_or_same(node["pattern"])
    if "patternProperties" in node:
        written = {_portable_or_same(p): s for p, s in node["patternProperties"].items()}
        if len(written) == len(node["patternProperties"]):
            node["patternProperties"] = written


def _portable_or_same(pattern: str) -> str:
    """A pattern without a portable form stays, and is found not to be enforced."""
    try:
        return portable(pattern)
    except UnknownSyntax:
        return pattern


def _write_format(node: dict[str, Any], backend: str, table: Capabilities) -> None:
    name = node.get("format")
    if name is None:
        return
    if name not in DEFINED or "string" not in types_of(node):
        del node["format"]
        return
    pattern = format_pattern(name)
    alone = not any(keyword in node for keyword in ("pattern", "minLength", "maxLength"))
    exact = table.verdict(backend, f"format/{name}") is Verdict.EXACT
    if pattern is None or (exact and alone):
        return
    if not table.verdict(backend, f"format-pattern/{name}").enforced:
        return
    del node["format"]
    if name in LENGTHS:
        node["maxLength"] = min(node.get("maxLength", LENGTHS[name]), LENGTHS[name])
    written = portable(pattern)
    if "pattern" in node:
        node.setdefault("allOf", []).append({"pattern": written, ORIGIN: node.get(ORIGIN, "")})
    else:
        node["pattern"] = written
