"""The chunks of requests that run side by side, read in one loop."""

import asyncio
import time
from collections.abc import Callable, Iterable

from radixrt.base.errors import RequestError
from radixrt.client.open_requests import ABORTED, Mailbox, OpenRequest, OpenRequests
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import GenerateRequest

DEADLINE_GRACE_S = 0.5
"""The scheduler ends a request at its deadline; the client does it this much later, should the
scheduler hang."""


class Answers:
    """Sends requests, each when fewer than ``max_concurrency`` of them run, and iterates over their
    chunks with the index of each chunk's request. All chunks arrive in one mailbox, so no task or
    generator stands between it and the reader.

    It is a context manager: leaving it aborts the requests that have not ended.
    """

    def __init__(
        self,
        open_requests: OpenRequests,
        abort: Callable[[OpenRequest], None],
        requests: Iterable[GenerateRequest],
        *,
        max_concurrency: int,
        max_buffered: float,
        on_chunk: Callable[[int, AnswerChunk], None],
    ) -> None:
        """
        Args:
            abort: lets the engine drop a request.
            max_buffered: chunks that may wait for the reader; with more, the requests are aborted.
            on_chunk: called with each chunk before the reader gets it.
        """
        self._open_requests = open_requests
        self._abort = abort
        self._waiting = enumerate(requests)
        self._max_concurrency = max_concurrency
        self._mailbox = Mailbox(max_buffered)
        self._on_chunk = on_chunk
        self._running: dict[int, OpenRequest] = {}
        self._overdue: dict[int, asyncio.TimerHandle] = {}
        """Timers of the running requests that have a deadline."""
        self._is_aborted = False

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *exception: object) -> None:
        for number, opened in list(self._running.items()):
            self._abort(opened)
            self._remove(number)

    def __aiter__(self) -> "Answers":
        return self

    async def __anext__(self) -> tuple[int, AnswerChunk]:
        """
        Raises:
            RequestError: a request was refused, or was lost, or the reader is too slow.
            EngineDiedError: the engine ended.
        """
        self._start()
        if not self._running:
            raise StopAsyncIteration
        while True:
            number, arrival = await self._mailbox.get()
            opened = self._running.get(number)
            if not isinstance(arrival, AnswerChunk):
                if opened is not None:
                    self._remove(number)
                raise arrival
            if opened is not None:
                break  # else a deadline has ended the request before its last chunk came
        opened.unfinished -= arrival.finish_reason is not None
        if not opened.unfinished:
            self._remove(number)
        if arrival.progress is None:
            self._on_chunk(number, arrival)
        return number, arrival

    def abort(self) -> None:
        """End all answers where they are, with finish reason "abort". If a request has not begun,
        the reader gets a RequestError."""
        self._is_aborted = True
        for opened in self._running.values():
            self._abort(opened)

    def _start(self) -> None:
        """Send as many of the waiting requests as may run now."""
        while len(self._running) < self._max_concurrency:
            number, request = next(self._waiting, (0, None))
            if request is None:
                return
            if self._is_aborted:
                raise RequestError(
                    "The request was aborted before all of it had begun.", code=ABORTED
                )
            opened = OpenRequest(request, self._mailbox, number)
            self._open_requests.add(opened)
            self._running[number] = opened
            if (deadline := request.options.deadline) is not None:
                self._overdue[number] = asyncio.get_running_loop().call_later(
                    deadline - time.time() + DEADLINE_GRACE_S, self._end, opened
                )

    def _end(self, opened: OpenRequest) -> None:
        """The engine has not kept the deadline: end the answers here."""
        self._abort(opened)
        opened.end()

    def _remove(self, number: int) -> None:
        if timer := self._overdue.pop(number, None):
            timer.cancel()
        self._open_requests.remove(self._running.pop(number))
