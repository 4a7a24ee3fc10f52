"""Which prefixes must stay in the cache while a batch needs them? Long ones that runs begin with which still wait.

Who else uses the server may push out what the next run begins with; a lease keeps it. It is taken when the first of the
runs has been answered, so that it finds the prefix computed, and ends when no run begins with it any more, however the
batch ends. If this process dies, it ends by itself.
"""

import asyncio
from collections.abc import Callable

from radixrt.lang.backends.protocol import Backend, Prompt

SHORTEST_CHARS = 4096
"""A shorter prefix is computed again in less time than it takes to ask for it."""
LEASE_S = 300.0
"""Of one lease; it is renewed as long as the batch needs it."""
PATIENCE_S = 5.0
"""How long the end of a batch waits at most for the server to take its leases back."""


class Pins:
    """The leases of one batch. Lives in the runtime's event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._needed: dict[str, asyncio.Event] = {}
        """Of each prefix that is held, what tells its holder that it is needed no more."""
        self._holders: set[asyncio.Task[None]] = set()

    def hold(self, prefix: Prompt, text: str) -> None:
        """Keep a prefix from now on, unless a longer one is kept.

        Args:
            text: the prefix as a text; it names the lease.
        """
        if any(held.startswith(text) for held in self._needed):
            return
        is_over = self._needed[text] = asyncio.Event()
        holder = asyncio.create_task(self._hold(prefix, is_over))
        self._holders.add(holder)
        holder.add_done_callback(self._holders.discard)

    def let_go(self, is_needed: Callable[[str], bool]) -> None:
        """Let go of prefixes that are not needed."""
        for text in [text for text in self._needed if not is_needed(text)]:
            self._needed.pop(text).set()

    async def end(self) -> None:
        """Let go of all, and wait until the server knows."""
        self.let_go(lambda _: False)
        if self._holders:
            _, too_slow = await asyncio.wait(self._holders, timeout=PATIENCE_S)
            for holder in too_slow:
                holder.cancel()

    async def _hold(self, prefix: Prompt, is_over: asyncio.Event) -> None:
        lease: str | None = None
        while not is_over.is_set():
            renewed = await self._backend.pin(prefix, LEASE_S)
            await self._unpin(lease)
            if (lease := renewed) is None:
                return  # the server pins nothing, or no more
            await _happens(is_over, LEASE_S / 2)
        await self._unpin(lease)

    async def _unpin(self, lease: str | None) -> None:
        if lease is not None:
            await self._backend.unpin(lease)


async def _happens(event: asyncio.Event, seconds: float) -> None:
    """Wait until it does, or the time is over."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()
