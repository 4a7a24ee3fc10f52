"""Turns every error into an HTTP response, with the error object of the API that its path belongs
to."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from radixrt.base.errors import EngineDiedError, RequestError, unexpected_error

log = logging.getLogger(__name__)

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {
    413: "request_too_large",
    503: "overloaded_error",
    529: "overloaded_error",
}
_ANTHROPIC_FIELDS = {"max_reasoning_tokens": "thinking.budget_tokens", "stop": "stop_sequences"}
"""Names of fields, by those of chat."""


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
    kind = _OPENAI_TYPES.get(error.status, fallback)
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def _anthropic_body(error: RequestError) -> dict[str, Any]:
    """Anthropic's error object. ``param`` and ``code`` are ours."""
    message, param = error.message, error.param
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words that clients look for
    if param in _ANTHROPIC_FIELDS:
        message = message.replace(param, _ANTHROPIC_FIELDS[param], 1)
        param = _ANTHROPIC_FIELDS[param]
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    inner = {"type": kind, "message": message, "param": param, "code": error.code}
    return {"type": "error", "error": inner}


class ErrorShape(NamedTuple):
    """The form of errors under a path."""

    path: str
    """Its beginning."""
    body: Callable[[RequestError], dict[str, Any]]
    """The JSON of a response."""
    event: str = ""
    """Name of the event that ends a stream with such a body; "": none."""


_SHAPES = (
    ErrorShape("/v1/messages", _anthropic_body, "error"),
    ErrorShape("/api/", lambda error: {"error": error.message}),
    ErrorShape("", error_body),
)


def shape_of(path: str) -> ErrorShape:
    """The form of errors under a path, or under what is known of it."""
    return next(shape for shape in _SHAPES if path.startswith(shape.path))


class ErrorResponse(Response):
    """An error in the form of the API that the request's path belongs to."""

    media_type = "application/json"

    def __init__(self, error: RequestError) -> None:
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(orjson.dumps(error_body(error)), error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = orjson.dumps(shape_of(scope["path"]).body(self._error))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _where_it_is(app: FastAPI, path: str) -> str:
    """What to change where a client's base URL lacks ``/v1``, doubles it, or has it where none
    belongs (``/v1/api/chat``)."""
    paths = app.openapi()["paths"]
    if path.startswith("/v1/") and path.removeprefix("/v1") in paths:
        return "leave /v1 out of the base URL; the client adds what is needed itself."
    if f"/v1{path}" in paths:
        return "add /v1 to the base URL."
    return "GET / lists the endpoints."


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of the application become an :class:`ErrorResponse`."""

    @app.exception_handler(RequestError)
    @app.exception_handler(EngineDiedError)
    @app.exception_handler(Exception)
    async def handle_error(request: Request, error: Exception) -> Response:
        return ErrorResponse(as_request_error(error))

    @app.exception_handler(RequestValidationError)
    async def handle_wrong_query(request: Request, error: RequestValidationError) -> Response:
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])
        return ErrorResponse(RequestError(f"{name}: {wrong['msg']}.", param=name))

    @app.exception_handler(HTTPException)
    async def handle_http_exception(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = str(error.detail)
        if error.status_code == 404:
            message = f"There is no {path:.200} here; {_where_it_is(app, path)}"
        elif error.status_code == 405:
            message = f"{path:.200} does not take {request.method}."
        response = ErrorResponse(RequestError(message, status=error.status_code))
        response.headers.update(error.headers or {})
        return response
