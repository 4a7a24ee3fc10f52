"""Backend for an engine in this process: the server's endpoints, without a socket."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import httpx

from radixrt.api.app import build_app
from radixrt.api.state import ServerState
from radixrt.base.errors import EngineDiedError
from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.server import RadixrtBackend
from radixrt.lang.errors import ConnectionLost
from radixrt.offline.llm import LLM

_URL = "http://engine-in-this-process"
"""Never connected to; HTTP needs a name."""


class Engine(RadixrtBackend):
    """A :class:`radixrt.LLM`. Its owner closes it; the backend does not."""

    def __init__(self, llm: LLM) -> None:
        http = HttpClient(_URL, llm.config.api_key, "Make a new LLM.", _InProcess(llm))
        super().__init__("The engine in this process", http)


class _InProcess(httpx.AsyncBaseTransport):
    """Passes requests to the api's application in the engine's event loop, and answers back to this
    one."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.background
        self._app = build_app(ServerState(llm.config, self._engine.client, llm.info))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ConnectionLost if the engine ended."""
        here = asyncio.get_running_loop()
        sent: asyncio.Queue[Any] = asyncio.Queue()
        unread = [{"type": "http.request", "body": await request.aread()}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            return await asyncio.get_running_loop().create_future()  # until it is cancelled

        async def send(message: Any) -> None:
            here.call_soon_threadsafe(sent.put_nowait, message)

        try:
            answering = self._engine.submit(self._app(_scope(request), receive, send))
        except EngineDiedError as error:
            raise ConnectionLost(f"The engine in this process ended: {error}") from error
        answering.add_done_callback(lambda _: here.call_soon_threadsafe(sent.put_nowait, None))
        body = _Body(sent, answering)
        try:
            start = await sent.get()
        except BaseException:
            await body.aclose()
            raise
        if start is None:
            raise ConnectionLost("The engine in this process ended before it answered.")
        return httpx.Response(start["status"], headers=start["headers"], stream=body)


class _Body(httpx.AsyncByteStream):
    """The body of an answer. Closing it cancels the request."""

    def __init__(self, sent: asyncio.Queue[Any], answering: Future[None]) -> None:
        self._sent = sent
        self._answering = answering

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._sent.get()) is not None:
            yield message["body"]

    async def aclose(self) -> None:
        self._answering.cancel()


def _scope(request: httpx.Request) -> dict[str, Any]:
    """The ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.url.path,
        "raw_path": request.url.raw_path,
        "query_string": request.url.query,
        "headers": request.headers.raw,
        "server": None,
        "client": None,
    }
