"""Turns every error into an HTTP response with OpenAI's error object."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from radixrt.base.errors import EngineDiedError, RequestError, unexpected_error

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def as_request_error(error: Exception) -> RequestError:
    """The error to send to the client. An unexpected error is logged, and its text is not sent."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDiedError):
        return RequestError(f"The engine ended: {error}", status=503)
    log.error("A request failed.", exc_info=error)
    return unexpected_error()


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"{message} (prompt is too long)"  # the words that LangChain looks for
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }


@dataclass(frozen=True)
class ErrorShape:
    """The form of errors under a path."""

    path: str
    """Its beginning."""
    body: Callable[[RequestError], dict[str, Any]]
    """The JSON of a response."""
    event: str
    """Name of the event that ends a stream with such a body; "": none."""


OPENAI_ERRORS = ErrorShape("/", error_body, "")


class _ErrorResponse(Response):
    """An error in the form of the API that the request's path belongs to."""

    media_type = "application/json"

    def __init__(self, error: RequestError, shapes: Sequence[ErrorShape]) -> None:
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(orjson.dumps(error_body(error)), error.status, headers)
        self._error = error
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = orjson.dumps(error_shape(scope, self._shapes).body(self._error))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: RequestError, shapes: Sequence[ErrorShape] = ()) -> Response:
    """
    Args:
        shapes: those other than OpenAI's, where no application that has them is around this.
    """
    return _ErrorResponse(error, shapes)


def error_shape(scope: Scope, shapes: Sequence[ErrorShape] = ()) -> ErrorShape:
    """The form of errors of a request; ``shapes`` as in :func:`error_response`."""
    known = scope["app"].state.error_shapes if "app" in scope else shapes
    return shape_of(scope["path"], known)


def shape_of(path: str, shapes: Sequence[ErrorShape]) -> ErrorShape:
    """The form of errors under a path, or under what is known of it."""
    return next((shape for shape in shapes if path.startswith(shape.path)), OPENAI_ERRORS)


def _where_it_is(app: FastAPI, path: str) -> str:
    """What to change where a client's base URL lacks ``/v1``, doubles it, or has it where none
    belongs (``/v1/api/chat``)."""
    paths = app.openapi()["paths"]
    if path.startswith("/v1/") and path.removeprefix("/v1") in paths:
        return "leave /v1 out of the base URL; the client adds what is needed itself."
    if f"/v1{path}" in paths:
        return "add /v1 to the base URL."
    return "GET / lists the endpoints."


def install_error_handlers(app: FastAPI, shapes: Sequence[ErrorShape]) -> None:
    """
    Args:
        shapes: of the paths whose errors are not in OpenAI's form.
    """
    app.state.error_shapes = shapes

    @app.exception_handler(RequestError)
    @app.exception_handler(EngineDiedError)
    @app.exception_handler(Exception)
    async def handle_error(request: Request, error: Exception) -> Response:
        return error_response(as_request_error(error))

    @app.exception_handler(RequestValidationError)
    async def handle_wrong_query(request: Request, error: RequestValidationError) -> Response:
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])
        return error_response(RequestError(f"{name}: {wrong['msg']}.", param=name))

    @app.exception_handler(HTTPException)
    async def handle_http_exception(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        messages = {
            404: f"There is no {path:.200} here; {_where_it_is(app, path)}",
            405: f"{path:.200} does not take {method}.",
        }
        message = messages.get(error.status_code, str(error.detail))
        response = error_response(RequestError(message, status=error.status_code))
        response.headers.update(error.headers or {})
        return response
