"""Middleware of every HTTP request: size limit, draining, request id."""

import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt.api.http.errors import error_response
from radixrt.api.http.events import HEADERS_ALONE
from radixrt.base.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})

_UNDERSCORED = frozenset({"call", "fc", "msg", "resp", "rs", "toolu"})
"""Prefixes that an underscore ends: clients compare them with ids of OpenAI and Anthropic."""


def new_id(prefix: str) -> str:
    """A random id, written as the API of its kind writes it."""
    return f"{prefix}{'_' if prefix in _UNDERSCORED else '-'}{uuid.uuid4().hex}"


class RefuseWhileDraining:
    """Answers 503 to new requests once the server has been told to stop."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self.app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_draining() and scope["path"] not in OPEN_PATHS:
            error = RequestError("The server is shutting down.", status=503, retry_after_s=5)
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


class AnswerHead:
    """Lets HEAD be asked of everything that takes GET; uvicorn leaves the body out, and streams end
    with their headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", HEADERS_ALONE: True}
        await self.app(scope, receive, send)


class LimitBody:
    """Answers 413 to bodies above a size, whether they declare it or come in chunks."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_limited, send)

    def _too_large(self) -> RequestError:
        return RequestError(f"The body is larger than {self._max_bytes} bytes.", status=413)


class SetRequestId:
    """Gives every response, errors included, an ``X-Request-Id``: ``request.state.request_id`` if
    the endpoint has set it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = new_id("req")

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self.app(scope, receive, send_named)
