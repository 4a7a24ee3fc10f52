"""Writes values of a request as JSON again."""

from typing import Any

import orjson

from radixrt.base.errors import RequestError


def json_text(value: Any, where: str = "") -> str:
    """
    Args:
        where: the field in errors; "": the request itself.

    Raises:
        RequestError: it can't be written: an integer beyond 64 bits, or too deep nesting.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        message = f"{where or 'The request'} can't be written as JSON: {error}."
        raise RequestError(message, param=where or None) from error
