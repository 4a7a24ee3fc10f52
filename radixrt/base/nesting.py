"""Limits the nesting of JSON values for chat templates and schemas."""

from typing import Any

from radixrt.base.errors import RequestError

MAX_DEPTH = 64
"""Templates fail at deeper values."""


def check_depth(value: Any, field: str, limit: int = MAX_DEPTH) -> None:
    """Raises:
    RequestError: lists and objects are nested more than ``limit`` deep.
    """
    if _is_deeper(value, limit - 1):
        raise RequestError(f"{field} is nested more than {limit} deep.", param=field)


def _is_deeper(value: Any, allowed: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return allowed < 0 or any(_is_deeper(item, allowed - 1) for item in value)
