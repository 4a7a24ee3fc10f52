"""Responses, whole or as server-sent events, whose work is cancelled when the client
disconnects."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from radixrt.api.http.errors import ErrorResponse, as_request_error, shape_of
from radixrt.base.errors import RequestError

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"

HEADERS_ALONE = "radixrt.headers_alone"
"""Key of a request's scope: the client asked with HEAD."""

COMMENT = b": waiting\n\n"
COMMENT_EVERY_S = 5.0
"""Seconds without an event, as while a new engine starts."""


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event.

    Args:
        name: its ``event`` field; "": none.
    """
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


def json_line(value: Any) -> bytes:
    """One line of a stream of JSON objects."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work; cancel it at once when the client disconnects.

    Raises:
        RequestError: the client has disconnected.
    """
    return await while_receiving(request.receive, work)


async def while_receiving(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestError("The client left.", status=499)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events.

    An error before the first event becomes a plain error response with its own status; a later one
    becomes an error event, and the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_receiving(receive, self._send_all(scope, receive, send))
        except RequestError:
            pass  # the client left
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except Exception as error:
            await ErrorResponse(as_request_error(error))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope.get(HEADERS_ALONE):
            await self._send_body(send, b"", more=False)
            return
        await self._send_body(send, first)
        comments = asyncio.ensure_future(self._fill_pauses(send))
        try:
            async for data in self._events:
                self._sent_at = time.monotonic()
                await self._send_body(send, data)
        except Exception as error:
            shape = shape_of(scope["path"])
            encoded = self._encoded(shape.body(as_request_error(error)), shape.event)
            await self._send_body(send, encoded)
        finally:
            comments.cancel()
        await self._send_body(send, b"", more=False)

    async def _fill_pauses(self, send: Send) -> None:
        """Send comments while no event comes, so that no client or proxy takes the pause for the
        end."""
        while True:
            await asyncio.sleep(COMMENT_EVERY_S)
            if time.monotonic() - self._sent_at >= COMMENT_EVERY_S:
                await self._send_body(send, self._comment())

    def _comment(self) -> bytes:
        """What clients ignore."""
        return COMMENT

    @staticmethod
    def _encoded(value: Any, name: str) -> bytes:
        return event(value, name)

    @staticmethod
    async def _send_body(send: Send, data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})


class LineStream(EventStream):
    """A stream of JSON objects, one a line."""

    media_type = "application/x-ndjson"

    def __init__(
        self, lines: AsyncGenerator[bytes, None], nothing: Callable[[], dict[str, Any]]
    ) -> None:
        """
        Args:
            nothing: makes an object that adds nothing to the answer, as lines have no comments.
        """
        super().__init__(lines)
        self._nothing = nothing

    def _comment(self) -> bytes:
        return json_line(self._nothing())

    @staticmethod
    def _encoded(value: Any, name: str) -> bytes:
        return json_line(value)
