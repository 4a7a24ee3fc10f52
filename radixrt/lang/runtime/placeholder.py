"""The place of a model call's answer in a transcript, filled by a background event loop."""

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from radixrt.base.liveness.supervision import run_loop, start_thread
from radixrt.lang.backends.protocol import PartialValue, Piece
from radixrt.lang.errors import Cancelled, LangError
from radixrt.lang.tracing.records import CallRecord

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class BackgroundLoop:
    """An event loop in a daemon thread. It starts at its first use, and again in a forked child
    process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = 0

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._process_id != os.getpid():
                self._loop = asyncio.new_event_loop()
                self._process_id = os.getpid()
                start_thread(run_loop, self._loop, name="radixrt-lang", on_failure=log.error)
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Run a coroutine in the loop. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.get())


BACKGROUND = BackgroundLoop()


async def settled(future: "concurrent.futures.Future[Any]") -> None:
    """Wait until a future of another thread has ended in any way. Cancelling the wait does not
    cancel the future."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was seen
    await asyncio.wait([waiting])


@dataclass
class Completion:
    """One of a call's answers, put together from its pieces. A variable that the program set itself
    has a value only."""

    text: str = ""
    value: Any = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls in OpenAI's form."""
    finish_reason: str | None = None
    reasoning: str = ""
    """The model's reasoning before the text."""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.finish_reason = piece.finish_reason or self.finish_reason
        for part in piece.tool_calls:
            while len(self.tool_calls) <= part.index:
                function = {"name": "", "arguments": ""}
                self.tool_calls.append({"id": "", "type": "function", "function": function})
            call = self.tool_calls[part.index]
            call["id"] = part.id or call["id"]
            call["function"]["name"] += part.name
            call["function"]["arguments"] += part.arguments


class Placeholder:
    """The place of one gen or select. The background loop fills it; any thread may read it."""

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self.pieces: list[str] = []
        """Its text so far."""
        self.values: list[PartialValue] = []
        """Complete values inside the answer so far, if the gen has asked for them."""
        self.tells_values = False
        self.python_type: Any = Any
        """The type of the whole value."""
        self.error_was_seen = False
        """The program has met the error of this call."""
        self.future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
        """Ends when the call has a result or an error."""

    @property
    def completion(self) -> Completion:
        """The result of a call that has ended well."""
        return self.future.result(timeout=0)

    def wait(self) -> Completion:
        """Wait for the result.

        Raises:
            LangError: the call failed, or was cancelled.
        """
        concurrent.futures.wait([self.future])
        return self._outcome()

    async def wait_async(self) -> Completion:
        """:meth:`wait` without blocking the event loop."""
        await settled(self.future)
        return self._outcome()

    def read(self) -> Completion:
        """:meth:`wait` on behalf of the program; the record tells when."""
        completion = self.wait()
        self.record.was_read()
        return completion

    async def read_async(self) -> Completion:
        """:meth:`read` without blocking the event loop."""
        completion = await self.wait_async()
        self.record.was_read()
        return completion

    def _outcome(self) -> Completion:
        try:
            return self.completion
        except concurrent.futures.CancelledError:
            cancelled = Cancelled(f"{self.record.what} was cancelled before it had a value.")
            cancelled.source = self.record.source
            raise cancelled from None
        except Exception as error:
            self.error_was_seen = True
            if not isinstance(error, LangError):
                raise
            # The frames of this package say nothing about the program.
            raise error.with_traceback(None) from error.__cause__
