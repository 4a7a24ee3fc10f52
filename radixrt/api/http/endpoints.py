"""Declares endpoints by the struct of their JSON body, which is validated and described in
/openapi.json."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from msgspec.structs import replace
from starlette.datastructures import Headers

from radixrt.api.http.body import read_json, to_struct
from radixrt.api.http.keys import caller_of
from radixrt.api.requests.protocol import (
    GenerationFields,
    QueueFields,
    RequestBody,
    refuse_unsupported,
)
from radixrt.api.state import ServerState
from radixrt.kv.cache_hint import SESSION_HEADER, CacheHint

EXPLAIN_HEADER = "x-radixrt-explain-cache"
"""A header that, with the value 1, stands for ``explain`` in the field ``cache``."""

Body = TypeVar("Body", bound=RequestBody)
Endpoint = Callable[[Request, Body], Awaitable[Response]]


class Endpoints(APIRouter):
    """A router whose endpoints have typed bodies."""

    def __init__(self, state: ServerState) -> None:
        super().__init__()
        self.bodies: dict[str, type[RequestBody]] = {}
        """The struct of each path's body."""
        self._state = state

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
                body = await read_json(request, self._state.json_bounds)
                refuse(body)
                fields = to_struct(body, struct)
                # No endpoint ever sees a salt outside of its caller's namespace.
                caller = caller_of(request)
                fields.cache_salt = caller.tenant.salt(fields.cache_salt)
                if isinstance(fields, QueueFields | GenerationFields):
                    fields.cache = _with_headers(fields.cache, request.headers)
                self._state.check_model(getattr(fields, "model", None))
                caller.check_model(self._state.config.model_names)
                return await answer(request, fields)

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
