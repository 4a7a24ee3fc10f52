"""How do those who read along learn that there is more? A counter that threads and event loops can wait on."""

import asyncio
import threading


class Changes:
    """Counts what happened in a run. Read :attr:`count`, look, and wait until it is past what you read."""

    def __init__(self) -> None:
        self.count = 0
        self._happened = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def tell(self) -> None:
        """Something happened."""
        with self._happened:
            self.count += 1
            self._happened.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def wait(self, seen: int) -> None:
        """Until there is more than was seen."""
        with self._happened:
            self._happened.wait_for(lambda: self.count > seen)

    async def wait_async(self, seen: int) -> None:
        """The same in an event loop."""
        event = asyncio.Event()
        with self._happened:
            if self.count > seen:
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()
