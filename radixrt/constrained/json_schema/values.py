"""Equality and types of JSON values."""

from collections.abc import Iterable
from typing import Any


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
