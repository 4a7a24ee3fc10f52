"""Limits on the lengths of request fields, so that no request takes long to check: most entries, or characters."""

from collections.abc import Mapping
from typing import Any

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import MAX_LOGIT_BIAS

MAX_ENTRIES: Mapping[str, int] = {
    "messages": 10_000,
    "input": 10_000,
    "tools": 1024,
    "logit_bias": MAX_LOGIT_BIAS,
    "chat_template_kwargs": 1024,
}
"""Of lists and objects, by field. Other fields have limits of their own where they are read."""

MAX_CHARACTERS: Mapping[str, int] = {
    "cache_salt": 1024,
    "model": 1024,
    "continue_from": 1024,
    "previous_response_id": 1024,
    "lease": 1024,
    "guided_decoding_backend": 1024,
    "reasoning_effort": 1024,
}
"""Of strings, by field."""


def check_lengths(body: Mapping[str, Any]) -> None:
    """Raises:
    RequestError: a field is too long; names it and its limit.
    """
    for name, most in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise _too_long(name, len(value), most, "entries")
    for name, most in MAX_CHARACTERS.items():
        value = body.get(name)
        if isinstance(value, str) and len(value) > most:
            raise _too_long(name, len(value), most, "characters")


def _too_long(name: str, size: int, most: int, unit: str) -> RequestError:
    return RequestError(f"{name} has {size} {unit}; at most {most} are taken.", param=name)
