"""Reads a request body into a typed struct, strictly, with errors that name the field."""

import itertools
import logging
import re
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.requests.protocol import UNSUPPORTED, check_lengths
from radixrt.base.convert import MAX_DEPTH
from radixrt.base.errors import RequestError, shown
from radixrt.base.settings.peers import FIELDS

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

_warned: set[str] = set()
_MAX_WARNINGS = 1000
_LONGEST_NAME = 100
"""Limits on the memory for names, which come from clients."""
_MAX_SHOWN = 10
"""Most names in one log line."""

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are read at once."""


async def read_json(request: Request, bounds: JsonBounds) -> dict[str, Any]:
    """The body as a JSON object; its integers are exact.

    Raises:
        RequestError: it is not a JSON object in UTF-8, or holds too many values. NaN and lone
            surrogates are not JSON.
    """
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise RequestError("The client left before its request was complete.") from error
    if len(raw) <= SMALL_BODY_BYTES:
        return _parsed(raw)
    await bounds.check(raw)
    return await bounds.in_turn(lambda: _parsed(raw))


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as error:
        message = f"The body is not valid JSON, or is nested more than {MAX_DEPTH} deep."
        raise RequestError(message) from error
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    return body


def to_struct(body: dict[str, Any], struct: type[Body]) -> Body:
    """Check types. Unknown fields are accepted, as OpenAI does, and named in the log once.

    Raises:
        RequestError: a field is missing, too long or of the wrong type; names the field.
    """
    check_lengths(body)
    try:
        value = msgspec.convert(body, struct)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from error
    _warn_of_unknown_fields(body, set(struct.__struct_fields__))
    return value


def _warn_of_unknown_fields(body: dict[str, Any], known: set[str]) -> None:
    if len(_warned) >= _MAX_WARNINGS:
        return
    named = known | set(UNSUPPORTED)
    unknown = (name[:_LONGEST_NAME] for name in body if name not in named)
    first = set(itertools.islice(unknown, _MAX_WARNINGS))
    new = sorted(first - _warned)[: _MAX_WARNINGS - len(_warned)]
    if not new:
        return
    _warned.update(new)
    ours = {name: f" (here {FIELDS[name]})" for name in new if FIELDS.get(name) in known}
    shown = ", ".join(f"{name!r}{ours.get(name, '')}" for name in new[:_MAX_SHOWN])
    more = f" and {len(new) - _MAX_SHOWN} more" if len(new) > _MAX_SHOWN else ""
    log.warning("Ignored unknown request fields (each is named once): %s%s.", shown, more)


def _wrong_field(error: msgspec.ValidationError) -> RequestError:
    """msgspec says ``Expected `int`, got `str` - at `$.max_tokens```."""
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    missing = re.match(r"Object missing required field `(.*)`", text)
    if missing:
        path = f"{path}.{missing.group(1)}".lstrip(".")
        return RequestError(f"{path} is missing.", param=path)
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    if unknown:
        path = f"{path}.{unknown.group(1)}".lstrip(".")
        return RequestError(f"Unknown field {shown(path)}; leave it out.", param=path)
    wrong = re.match(r"Expected `(.*)`, got `(.*)`", text)
    if wrong:
        expected, got = (_json_names(names) for names in wrong.groups())
        text = f"must be {expected}, not {got}"
    return RequestError(f"{path or 'The body'}: {text}.", param=path or None)


def _json_names(types: str) -> str:
    names = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
    return " or ".join(names.get(name, name) for name in types.split(" | "))
