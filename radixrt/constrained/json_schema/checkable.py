"""Writes a schema for a validator in Python, so that the validator follows the specification exactly."""

from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.dialects import python_pattern
from radixrt.constrained.json_schema.ecma_regex import UnknownSyntax
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.walk import Node, mapped, pointer_of

_READ_ALIKE = (
    r"\A(?:[^\\(]|\\[bBdDwWsStnrfv0-9^$\\.*+?()\[\]{}|/\-]|\((?!\?)|\(\?(?:[:=!]|<[=!]))*\Z"
)
"""Regular expressions in the syntax that Python and ECMA-262 share; jsonschema decides whether they are well-formed."""


def checkable(node: Any) -> Any:
    """A copy without origins in which patterns are Python's, and formats are asserted by patterns.

    Raises:
        CannotEnforce: a pattern is not well-formed, or the values of a format are not known.
    """
    if not isinstance(node, dict):
        return node
    origin = node.get(ORIGIN, "")
    result = mapped(node, lambda _, child: checkable(child))
    result.pop(ORIGIN, None)
    if "pattern" in result:
        result["pattern"] = _pattern(result["pattern"], f"{origin}/pattern")
    if "patternProperties" in result:
        where = f"{origin}/patternProperties"
        result["patternProperties"] = {
            _pattern(pattern, where + pointer_of([pattern])): schema
            for pattern, schema in result["patternProperties"].items()
        }
    if "format" in result:
        _assert_format(result, origin)
    return result


def _pattern(pattern: str, pointer: str) -> str:
    try:
        return python_pattern(pattern)
    except UnknownSyntax as error:
        raise CannotEnforce(
            "pattern", pointer, f"{error}. Write it in plainer ECMA-262 syntax."
        ) from error


def _assert_format(node: Node, origin: str) -> None:
    name = node["format"]
    if name not in DEFINED:
        del node["format"]
        return
    pattern = _READ_ALIKE if name == "regex" else format_pattern(name)
    if pattern is None:
        raise CannotEnforce(
            "format", f"{origin}/format", f"nothing here knows what {name!r} allows; leave it out."
        )
    asserted: Node = {"pattern": pattern if name == "regex" else python_pattern(pattern)}
    if name in LENGTHS:
        asserted["maxLength"] = LENGTHS[name]
    node["allOf"] = [*node.get("allOf", ()), asserted]
