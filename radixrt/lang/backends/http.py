"""HTTP client: sends JSON, receives JSON or server-sent events, and turns every failure into a
typed error."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from radixrt.lang.errors import BackendError, BadRequest, ConnectionLost, ServerFailed

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 10.0
LONGEST_RETRY_S = 60.0
"""Calls that an overloaded server refuses with Retry-After are repeated for this long in all."""


class HttpClient:
    """Connections to one server, used in the runtime's event loop. A forked child process opens its
    own."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        if_absent: str,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        """
        Args:
            if_absent: advice for the error when no server answers, as a sentence.
            transport: carries the requests; None: a socket.
        """
        self.base_url = base_url
        self._api_key = api_key
        self._if_absent = if_absent
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._process_id = 0
        """The process that opened the connections."""

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the answer.

        Raises:
            BackendError: or a subclass.
        """
        async with self._answer(method, path, body) as response:
            return _decoded(await response.aread())

    async def answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of the answer, or of each event if the body asks for a stream. Closing the
        generator cancels the request.

        Raises:
            BackendError: or a subclass.
        """
        if body.get("stream"):
            async with aclosing(self.events(path, body)) as events:
                async for event in events:
                    yield event
        else:
            yield await self.request("POST", path, body)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each server-sent event. Closing the generator closes the stream.

        Raises:
            BackendError: or a subclass.
        """
        async with self._answer("POST", path, body) as response:
            async for data in _event_data(response.aiter_bytes()):
                if data == b"[DONE]":
                    return
                event = _decoded(data)
                if isinstance(event, dict) and event.get("error"):
                    raise _error_of(500, event)
                yield event
        raise ConnectionLost(f"The server at {self.base_url} ended its answer in the middle.")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> "AsyncIterator[httpx.Response]":
        """Send the request, again while the server is overloaded; the response, with its headers
        read."""
        import httpx  # here: it takes most of the time of importing the language

        waited_s = 0.0
        while True:
            try:
                async with self._request(httpx, method, path, body) as response:
                    if response.status_code < 400:
                        yield response
                        return
                    error = _error_of(response.status_code, _decoded(await response.aread(), {}))
                    retry_after_s = _retry_after_s(response)
            except httpx.ConnectError as cause:
                raise ConnectionLost(
                    f"No server answers at {self.base_url}. {self._if_absent}"
                ) from cause
            except httpx.TransportError as cause:
                reason = str(cause) or type(cause).__name__
                raise ConnectionLost(
                    f"The connection to the server at {self.base_url} was lost: {reason}."
                ) from cause
            if retry_after_s is None or waited_s + retry_after_s > LONGEST_RETRY_S:
                raise error
            await asyncio.sleep(retry_after_s)
            waited_s += retry_after_s

    def _request(self, httpx: Any, method: str, path: str, body: dict[str, Any] | None) -> Any:
        if self._client is None or self._process_id != os.getpid():
            self._process_id = os.getpid()
            headers = {"content-type": "application/json"}
            if self._api_key:
                headers["authorization"] = f"Bearer {self._api_key}"
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
                transport=self._transport,
            )
        content = None if body is None else _encoded(body)
        return self._client.stream(method, self.base_url + path, content=content)


async def _event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event. Only line feeds end lines: JSON may contain Unicode's other line
    separators."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _encoded(body: dict[str, Any]) -> bytes:
    """Raises BadRequest if a text is not valid Unicode."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise BadRequest(
            "A text of the call holds a lone surrogate (half of a UTF-16 pair), which is not a character; send valid "
            "Unicode."
        ) from error


def _decoded(data: bytes, otherwise: Any = None) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        if otherwise is not None:
            return otherwise
        raise ServerFailed(
            f"The server's answer is not JSON: {error}. Is the address right?"
        ) from error


def _error_of(status: int, body: Any) -> BackendError:
    """The error of OpenAI's error object, or of a similar one."""
    detail = body.get("error", body) if isinstance(body, dict) else {}
    if not isinstance(detail, dict):
        detail = {"message": str(detail)}
    message = (
        detail.get("message")
        or detail.get("detail")
        or f"The server answered with status {status}."
    )
    if status >= 500 or status == 429:
        return ServerFailed(str(message), status)
    return BadRequest(str(message), status, detail.get("param"), detail.get("code"))


def _retry_after_s(response: "httpx.Response") -> float | None:
    """Seconds after which an overloaded server asks to try again."""
    if response.status_code not in (429, 503):
        return None
    try:
        return max(float(response.headers["retry-after"]), 0.05)
    except (KeyError, ValueError):
        return None
