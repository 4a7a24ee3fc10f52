"""Fair queue of the work of encoding: round robin over tenants and, of each, over requests, with a
thread each for short texts, for long ones and for chats with images.

The prompts of one HTTP request share a key, so a request that comes after a batch of a thousand
prompts waits for one of them, not for all. Work runs in threads, so that the tokens of running
answers never wait. It must release the GIL, as the batch methods of ``tokenizers`` do and the
single ones don't.
"""

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from radixrt.base.round_robin import RoundRobin
from radixrt.base.token_bytes import give_memory_back

Result = TypeVar("Result")

_Job = tuple[asyncio.Future[Any], Callable[[], Any]]
"""Takes the result of the work."""

_lane_of_thread = threading.local()


class NobodyWaits(Exception):
    """The result of a piece of work is not wanted any more: its client has gone."""


def is_alive() -> None:
    """Say in a piece of work that it has not stopped: the time that it may take begins anew."""
    lane = getattr(_lane_of_thread, "lane", None)
    if lane is not None and lane.running is not None:
        lane.begun = time.monotonic()


def goes_on() -> None:
    """Say in a piece of work that it has come further, as :func:`is_alive` does.

    Raises:
        NobodyWaits: it need not go on.
    """
    lane = getattr(_lane_of_thread, "lane", None)
    if lane is not None and lane.running is not None and lane.running.cancelled():
        raise NobodyWaits
    is_alive()


SHORT_CHARS = 20_000
"""Up to this length encoding takes some tens of milliseconds; longer texts have a thread of their
own."""


class FairQueue:
    """Runs work in three threads. An image may take seconds, for which no text waits."""

    def __init__(self) -> None:
        self._short = _Lane("encode-short")
        self._long = _Lane("encode-long", gives_memory_back=True)
        self._images = _Lane("encode-images", gives_memory_back=True)
        self._lanes = self._short, self._long, self._images

    async def run(
        self,
        tenant: str,
        key: str,
        num_chars: int,
        work: Callable[[], Result],
        *,
        has_images: bool = False,
    ) -> Result:
        """Run the work when it is the turn of its tenant and, of the tenant's, of its key; return
        its result. Cancelled before that, it never runs; later, it ends where it calls
        :func:`goes_on`."""
        lane = self._short if num_chars <= SHORT_CHARS else self._long
        lane = self._images if has_images else lane
        return await lane.run(tenant, key, work)

    async def serve(self) -> None:
        """Serve until cancelled."""
        await asyncio.gather(*(lane.serve() for lane in self._lanes))

    def seconds_at_work(self) -> float:
        """Time for which the oldest piece of work in a thread has run; 0: none runs."""
        begun = [lane.begun for lane in self._lanes if lane.begun is not None]
        return time.monotonic() - min(begun) if begun else 0.0

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One thread and its queue."""

    def __init__(self, name: str, *, gives_memory_back: bool = False) -> None:
        self._gives_memory_back = gives_memory_back
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._begin)
        self._waiting = RoundRobin[_Job]()
        self._has_cancelled = False
        self._arrived = asyncio.Event()
        self.begun: float | None = None
        """Time of ``time.monotonic()`` at which the work in the thread began."""
        self.running: asyncio.Future[Any] | None = None
        """Takes the result of that work."""

    def _begin(self) -> None:
        _lane_of_thread.lane = self

    async def run(self, tenant: str, key: str, work: Callable[[], Result]) -> Result:
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, key, (done, work))
        self._arrived.set()
        try:
            return await done
        finally:
            if done.cancelled() and not self._has_cancelled:
                self._has_cancelled = True
                asyncio.get_running_loop().call_soon(self._drop_cancelled)
            del done, work  # an error, its frames and its future are a cycle otherwise

    def _drop_cancelled(self) -> None:
        """Forget the prompts that nobody waits for any more; those of a batch are cancelled at
        once."""
        self._has_cancelled = False
        self._waiting.drop(lambda job: job[0].cancelled())

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            done, work = await self._next()
            if done.cancelled():
                continue
            self.begun, self.running = time.monotonic(), done
            try:
                result = await loop.run_in_executor(self._thread, _without_leftovers, work)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)
                del result
            finally:
                self.begun = self.running = None
                del done, work  # they hold the prompt and its tokens until other work comes
            if self._gives_memory_back and not self._waiting:
                await loop.run_in_executor(self._thread, give_memory_back)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _next(self) -> _Job:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.pop()


def _without_leftovers(work: Callable[[], Result]) -> Result:
    """The result of some work. An error keeps no local variables of it: they may hold hundreds of
    megabytes until the garbage collector finds the cycle of an error and its frames. A panic of the
    tokenizers library is an error of the work alone."""
    try:
        return work()
    except BaseException as error:
        del work
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        if isinstance(error, Exception):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
