"""What is checked of every request before it is looked at? Its key and its size."""

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt.api.errors import error_response
from radixrt.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/metrics"})


class RequireApiKey:
    """Answers 401 to requests without ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = RequestError(
                    "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                    status=401,
                    code="invalid_api_key",
                )
                await error_response(error)(scope, receive, send)
                return
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
        return RequestError(
            f"The body is larger than {self._max_bytes} bytes (--max-body-bytes).", status=413
        )
