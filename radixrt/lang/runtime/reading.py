"""Iterates over text that is still being generated, from threads and from event loops."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from radixrt.lang.runtime.placeholder import Placeholder
from radixrt.lang.runtime.transcript import Part

TextSoFar = Iterator[str | None]
"""Pieces of text; None: no more for now."""


class ChangeCounter:
    """Counts the changes of a run. Readers note :attr:`count`, read, and wait until the count is higher."""

    def __init__(self) -> None:
        self.count = 0
        self._condition = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def increment(self) -> None:
        """Wake all readers."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def wait(self, seen: int) -> None:
        """Block until the count is above ``seen``."""
        with self._condition:
            self._condition.wait_for(lambda: self.count > seen)

    async def wait_async(self, seen: int) -> None:
        """:meth:`wait` without blocking the event loop."""
        event = asyncio.Event()
        with self._condition:
            if self.count > seen:
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()


class Pieces:
    """The pieces of a text, for ``for`` and ``async for``; waits where there is no more text yet."""

    def __init__(self, text: TextSoFar, changes: ChangeCounter) -> None:
        self._text = text
        self._changes = changes

    def __iter__(self) -> Iterator[str]:
        seen = self._changes.count
        for piece in self._text:
            if piece is not None:
                yield piece
                continue
            self._changes.wait(seen)
            seen = self._changes.count

    async def __aiter__(self) -> AsyncIterator[str]:
        seen = self._changes.count
        for piece in self._text:
            if piece is not None:
                yield piece
                continue
            await self._changes.wait_async(seen)
            seen = self._changes.count


def text_of_call(placeholder: Placeholder) -> TextSoFar:
    """The text of one call.

    Raises:
        LangError: the call failed.
    """
    num_read = 0
    while True:
        is_all = placeholder.future.done()
        pieces = placeholder.pieces[num_read:]
        num_read += len(pieces)
        yield from pieces
        if is_all:
            placeholder.wait()
            return
        if not pieces:
            yield None


def text_of_state(parts: Callable[[], Sequence[Part]], has_ended: Callable[[], bool]) -> TextSoFar:
    """The text of a state to which a program still appends.

    Raises:
        LangError: a call of the state failed.
    """
    num_read = 0
    while True:
        is_all = has_ended()
        new = parts()[num_read:]
        num_read += len(new)
        for part in new:
            if isinstance(part, str):
                yield part
            else:
                yield from text_of_call(part)
        if is_all:
            return
        if not new:
            yield None
