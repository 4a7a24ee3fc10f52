"""Converts the values of a request to the declared types of a struct."""

from typing import Any, TypeVar

import msgspec

from radixrt.base.errors import RequestError

Converted = TypeVar("Converted", bound=msgspec.Struct)


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
        raise RequestError(f"{name} is of the wrong type: {reason}.", param=name) from None
