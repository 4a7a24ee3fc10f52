"""Starts requests at a bounded rate, and refuses those beyond the limit, or before the model is
loaded, before any work is done for them.

Ten thousand requests at once would otherwise all begin in one turn of the event loop, and every
stream would wait for it. Here a few begin in each turn, in the order in which they came, and the
loop serves sockets in between. Probes do not wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from radixrt.api.http.errors import ErrorResponse
from radixrt.api.http.middleware import OPEN_PATHS, new_id
from radixrt.base.errors import RequestError

CONTROL_PATHS = frozenset(
    {
        "/abort_request",
        "/flush_cache",
        "/v1/cache/release",
        "/v1/replicas/drain",
        "/v1/replicas/start",
    }
)
"""POST requests that end or move work; they pass when the server is full."""

RETRY_AFTER_S = 2


class Throttle:
    """Runs callbacks in order, in each turn of the event loop only some."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = per_turn
        self._is_turning = False

    def run(self, callback: Callable[[], None]) -> bool:
        """Run it now if this turn has room for it, else in a later one (False)."""
        runs_now = self._left > 0 and not self._waiting
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if runs_now:
            self._left -= 1
            callback()
        else:
            self._waiting.append(callback)
        return runs_now

    def _turn(self) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        self._is_turning = self._left < self._per_turn
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)


class Throttles:
    """The throttles of one server."""

    def __init__(self) -> None:
        self.reads = Throttle(32)
        """First bytes of requests, some 0.1 ms of work each."""
        self.starts = Throttle(2)
        """Requests and their ends, some milliseconds each."""


class Gate:
    """ASGI middleware, outside of all others."""

    def __init__(
        self,
        app: ASGIApp,
        max_open: int,
        starts: Throttle,
        refused: Counter,
    ) -> None:
        """
        Args:
            max_open: most POST requests at a time.
            starts: limits how many requests begin in a turn of the event loop.
            refused: counts the refused ones.
        """
        self.app = app
        self._refused = refused
        self._max_open = max_open
        self._open = 0
        self._starts = starts
        self._full = RequestError(
            f"The server has {max_open} open requests and takes no more (--max-queued-requests).",
            status=503,
            retry_after_s=RETRY_AFTER_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        counts = scope["method"] == "POST" and scope["path"] not in CONTROL_PATHS
        if counts and self._open >= self._max_open:
            self._refused.inc()
            response = ErrorResponse(self._full)
            response.headers["x-request-id"] = new_id("req")
            await response(scope, receive, send)
            return
        self._open += counts
        try:
            await self._turn_to_start()
            await self.app(scope, receive, send)
        finally:
            self._open -= counts

    async def _turn_to_start(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if not turn.cancelled():
                turn.set_result(None)

        self._starts.run(begin)
        await turn


_LOADING = RequestError("The server is loading its model.", status=503, retry_after_s=RETRY_AFTER_S)


async def loading_app(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a server that loads its model."""
    response = ErrorResponse(_LOADING)
    response.headers["connection"] = "close"  # the next request is for the whole application
    await response(scope, receive, send)
