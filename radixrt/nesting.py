"""How deeply may lists and objects be nested that go to a chat template?"""

from typing import Any

from radixrt.errors import RequestError

MAX_DEPTH = 64


def check_depth(value: Any, field: str, allowed: int = MAX_DEPTH) -> None:
    """Raises:
    RequestError: lists and objects are nested so deeply that a template would fail at them.
    """
    if not allowed:
        raise RequestError(f"{field} is nested more than {MAX_DEPTH} deep.", param=field)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_depth(item, field, allowed - 1)
