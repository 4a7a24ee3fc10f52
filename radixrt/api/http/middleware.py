"""Checks every HTTP request before an endpoint sees it, and gives its response an id."""

import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt.api.http.browsers import BrowserRules
from radixrt.api.http.errors import ErrorResponse
from radixrt.api.http.events import HEADERS_ALONE
from radixrt.api.http.keys import Keys
from radixrt.base.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Answered while the server drains."""

_UNDERSCORED = frozenset({"call", "fc", "msg", "resp", "rs", "toolu"})
"""Prefixes that an underscore ends: clients compare them with ids of OpenAI and Anthropic."""


def new_id(prefix: str) -> str:
    """A random id, written as the API of its kind writes it."""
    return f"{prefix}{'_' if prefix in _UNDERSCORED else '-'}{uuid.uuid4().hex}"


class Admit:
    """Refuses requests of strange web pages, of callers without a key and beyond their limits, new
    ones while the server drains, and bodies above a size, whether they declare it or come in
    chunks. HEAD may be asked of everything that takes GET."""

    def __init__(
        self,
        app: ASGIApp,
        browsers: BrowserRules,
        keys: Keys,
        is_draining: Callable[[], bool],
        max_body_bytes: int,
    ) -> None:
        self.app = app
        self._browsers = browsers
        self._keys = keys
        self._is_draining = is_draining
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._browsers.check(scope["method"], headers)
            if self._is_draining() and scope["path"] not in OPEN_PATHS:
                raise RequestError("The server is shutting down.", status=503, retry_after_s=5)
            caller = scope["state"]["caller"] = self._keys.caller(scope)
            declared = headers.get("content-length", "0")
            self._check_size(int(declared) if declared.isdecimal() else 0)
            use = self._keys.begin(scope, caller)
        except RequestError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn leaves the body out
            scope = {**scope, "method": "GET", HEADERS_ALONE: True}
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            self._check_size(received)
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            if use is not None:
                use.end()

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            message = f"The body is larger than {self._max_body_bytes} bytes."
            raise RequestError(message, status=413)


class SetRequestId:
    """Gives every response, errors included, an ``X-Request-Id``: ``request.state.request_id`` if
    the endpoint has set it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = new_id("req")

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self.app(scope, receive, send_named)
