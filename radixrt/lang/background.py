"""Where do calls run while the program goes on? In one event loop, in a daemon thread of this process."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """An event loop that starts when it is first needed, and again in a forked child process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = 0

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._process_id != os.getpid():
                self._loop = asyncio.new_event_loop()
                self._process_id = os.getpid()
                threading.Thread(
                    target=self._loop.run_forever, daemon=True, name="radixrt-lang"
                ).start()
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Run a coroutine there. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.get())


BACKGROUND = BackgroundLoop()


async def settled(future: "concurrent.futures.Future[Any]") -> None:
    """Wait until a future of another thread has ended, however it has; giving up waiting does not cancel it."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was seen
    await asyncio.wait([waiting])
