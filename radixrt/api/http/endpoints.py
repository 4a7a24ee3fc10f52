"""Declares endpoints by the struct of their JSON body, which is read strictly, with errors that name
the field, and described in /openapi.json."""

import functools
import itertools
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.requests.protocol import (
    UNSUPPORTED,
    GenerationFields,
    QueueFields,
    RequestBody,
    check_lengths,
    refuse_unsupported,
)
from radixrt.api.state import Context, context_of
from radixrt.base.convert import MAX_DEPTH
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.base.settings.peers import FIELDS
from radixrt.kv.cache_hint import SESSION_HEADER, CacheHint

log = logging.getLogger(__name__)

EXPLAIN_HEADER = "x-radixrt-explain-cache"
"""A header that, with the value 1, stands for ``explain`` in the field ``cache``."""

Body = TypeVar("Body", bound=RequestBody)
Struct = TypeVar("Struct", bound=msgspec.Struct)
Endpoint = Callable[[Body, Context], Awaitable[Response]]


class Endpoints(APIRouter):
    """A router whose endpoints have typed bodies.

    Attributes:
        bodies: the struct of each path's body.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[str, type[RequestBody]] = {}

    def takes(
        self,
        path: str,
        struct: type[Body],
        refuse: Callable[[dict[str, Any]], None] = refuse_unsupported,
    ) -> Callable[[Endpoint[Body]], Endpoint[Body]]:
        """Decorates the handler of POST requests to ``path``. FastAPI sees the raw request only:
        msgspec checks types faster.

        Args:
            struct: type of the body.
            refuse: raises a RequestError if the body has a field that would have to be ignored.

        Raises:
            TypeError: the struct has no cache salt, so that its prompts would be in nobody's
                namespace.
        """
        if not issubclass(struct, RequestBody):
            raise TypeError(f"{path} takes a {struct.__name__}, which is not a RequestBody")
        self.bodies[path] = struct

        def declare(answer: Endpoint[Body]) -> Endpoint[Body]:
            @self.post(path, name=answer.__name__)
            async def endpoint(request: Request) -> Response:
                context = await context_of(request)
                state, caller = context.state, context.caller
                body = await read_json(request, state.json_bounds)
                refuse(body)
                fields = to_struct(body, struct)
                if isinstance(fields, QueueFields | GenerationFields):
                    fields.cache = _with_headers(fields.cache, request.headers)
                request.state.adapter = state.adapter_of(getattr(fields, "model", None))
                caller.check_model(state.config.model_names)
                return await answer(fields, context)

            return answer

        return declare


def _with_headers(hint: CacheHint | None, headers: Headers) -> CacheHint | None:
    """A request's cache hint, with those of its headers."""
    if headers.get(EXPLAIN_HEADER) == "1":
        hint = replace(hint or CacheHint(), explain=True)
    session = headers.get(SESSION_HEADER)
    if session and (hint is None or hint.session is None):
        hint = replace(hint or CacheHint(), session=session)
    return hint


def include(app: FastAPI, routers: list[APIRouter]) -> None:
    """Add endpoints, and the JSON schemas of their bodies to the app's description, which is made
    when it is first needed."""
    bodies: dict[str, type[msgspec.Struct]] = {}
    for router in routers:
        app.include_router(router)
        bodies |= getattr(router, "bodies", {})
    without_bodies = app.openapi

    @functools.cache
    def openapi() -> dict[str, Any]:
        description = without_bodies()
        schemas, components = msgspec.json.schema_components(
            bodies.values(), ref_template="#/components/schemas/{name}"
        )
        description.setdefault("components", {}).setdefault("schemas", {}).update(components)
        for path, schema in zip(bodies, schemas, strict=True):
            content = {"application/json": {"schema": schema}}
            post = description["paths"][path]["post"]
            post["requestBody"] = {"required": True, "content": content}
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation extends it


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


def to_struct(body: dict[str, Any], struct: type[Struct]) -> Struct:
    """Check types. Unknown fields are accepted, as OpenAI does, and named in the log once.

    Raises:
        RequestError: a field is missing, too long or of the wrong type; names the field.
    """
    check_lengths(body)
    try:
        value = msgspec.convert(body, struct)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from error
    if not getattr(struct, "is_passed_on", False):
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
        return wrong(path, "is missing")
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    if unknown:
        path = f"{path}.{unknown.group(1)}".lstrip(".")
        return RequestError(f"Unknown field {shown(path)}; leave it out.", param=path)
    mismatch = re.match(r"Expected `(.*)`, got `(.*)`", text)
    if mismatch:
        expected, got = (_json_names(names) for names in mismatch.groups())
        text = f"must be {expected}, not {got}"
    return RequestError(f"{path or 'The body'}: {text}.", param=path or None)


def _json_names(types: str) -> str:
    names = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
    return " or ".join(names.get(name, name) for name in types.split(" | "))
