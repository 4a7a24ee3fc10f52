"""Whose text is encoded next? Requests take turns, and none waits for one of another size.

A batch of a thousand prompts is one request of a thousand: whoever comes after it waits for one of its
prompts, not for all. The work is done in threads, so that the tokens of running answers never wait; it
must therefore release the GIL, as the batch methods of ``tokenizers`` do and its single ones don't.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

SHORT_CHARS = 20_000
"""Up to this length encoding takes some tens of milliseconds; longer texts have a thread of their own."""


class Turns:
    """Runs work in two threads, one for short texts and one for long ones."""

    def __init__(self) -> None:
        self._short = _Lane("encode-short")
        self._long = _Lane("encode-long")

    async def run(self, owner: str, num_chars: int, work: Callable[[], Result]) -> Result:
        """Do the work when it is its owner's turn. Cancelled before that, it is never begun."""
        lane = self._short if num_chars <= SHORT_CHARS else self._long
        return await lane.run(owner, work)

    async def serve(self) -> None:
        """Work until cancelled."""
        await asyncio.gather(self._short.serve(), self._long.serve())

    def close(self) -> None:
        self._short.close()
        self._long.close()


class _Lane:
    """One thread, and the row of those who wait for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        """Each owner's work in order; the first owner is next, and goes to the end of the row then."""
        self._arrived = asyncio.Event()

    async def run(self, owner: str, work: Callable[[], Result]) -> Result:
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((done, work))
        self._arrived.set()
        return await done

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            done, work = await self._next()
            if done.cancelled():
                continue
            try:
                result = await loop.run_in_executor(self._thread, work)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _next(self) -> tuple[asyncio.Future[Any], Callable[[], Any]]:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        owner = next(iter(self._waiting))
        own = self._waiting.pop(owner)
        job = own.popleft()
        if own:
            self._waiting[owner] = own
        return job
