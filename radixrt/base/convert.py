"""Checks values of requests: their types, and how deep they are nested."""

from typing import Any, TypeVar

import msgspec

from radixrt.base.errors import wrong

Converted = TypeVar("Converted", bound=msgspec.Struct)

MAX_DEPTH = 64
"""Deepest nesting of a JSON value that chat templates take; they fail at deeper ones."""


def converted(values: dict[str, Any], kind: type[Converted], field: str = "") -> Converted:
    """A struct of the type ``kind`` with these values.

    Args:
        field: the request field of the whole struct; "": the struct's fields are the request's own.

    Raises:
        RequestError: a value is of another type; names the field.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        name = path.strip("`$.").partition("[")[0]
        name = f"{field}.{name}" if field else name
        raise wrong(name, f"is of the wrong type: {reason}") from None


def check_depth(value: Any, field: str, limit: int = MAX_DEPTH) -> None:
    """Raises RequestError if lists and objects are nested more than ``limit`` deep."""
    if _is_deeper(value, limit - 1):
        raise wrong(field, f"is nested more than {limit} deep")


def _is_deeper(value: Any, allowed: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return allowed < 0 or any(_is_deeper(item, allowed - 1) for item in value)
