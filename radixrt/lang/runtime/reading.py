"""Iterates over text that is still being generated, from threads and from event loops."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from radixrt.lang.backends.protocol import PartialValue
from radixrt.lang.errors import unreadable
from radixrt.lang.runtime.placeholder import Placeholder
from radixrt.lang.runtime.transcript import Part, text_of
from radixrt.lang.typed import convert, type_at

Item = TypeVar("Item")
Grown = TypeVar("Grown")
TextSoFar = Iterator[str | None]
"""Pieces of text; None: no more for now."""


class ChangeCounter:
    """Counts the changes of a run. Readers note :attr:`count`, read, and wait until the count is
    higher."""

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


class Pieces(Generic[Item]):
    """The pieces of an answer, for ``for`` and ``async for``; waits where there are no more yet."""

    def __init__(self, text: Iterator[Item | None], changes: ChangeCounter) -> None:
        self._text = text
        self._changes = changes

    def __iter__(self) -> Iterator[Item]:
        seen = self._changes.count
        for piece in self._text:
            if piece is not None:
                yield piece
                continue
            self._changes.wait(seen)
            seen = self._changes.count

    async def __aiter__(self) -> AsyncIterator[Item]:
        seen = self._changes.count
        for piece in self._text:
            if piece is not None:
                yield piece
                continue
            await self._changes.wait_async(seen)
            seen = self._changes.count


def _growing(
    items: Callable[[], Sequence[Grown]], has_ended: Callable[[], bool]
) -> Iterator[Grown | None]:
    """The items of a list to which another thread still appends; None: no more for now."""
    num_read = 0
    while True:
        is_all = has_ended()
        new = items()[num_read:]
        num_read += len(new)
        yield from new
        if is_all:
            return
        if not new:
            yield None


def text_of_call(placeholder: Placeholder) -> TextSoFar:
    """The text of one call.

    Raises:
        LangError: the call failed.
    """
    yield from _growing(lambda: placeholder.pieces, placeholder.future.done)
    placeholder.wait()


def values_of_call(placeholder: Placeholder) -> Iterator[PartialValue | None]:
    """The values inside the answer of one call, in the order in which they are complete; None: no
    more for now.

    Raises:
        LangError: the call failed, or a value is not of its type.
    """
    for part in _growing(lambda: placeholder.values, placeholder.future.done):
        yield part and _typed(part, type_at(placeholder.python_type, part.pointer))
    placeholder.wait()


def _typed(part: PartialValue, wanted: Any) -> PartialValue:
    if wanted is Any:
        return part
    try:
        return PartialValue(part.pointer, convert(wanted, part.value))
    except ValueError as error:
        raise unreadable(str(part.value), wanted, error, cut_off=False) from error


def text_of_state(parts: Callable[[], Sequence[Part]], has_ended: Callable[[], bool]) -> TextSoFar:
    """The text of a state to which a program still appends.

    Raises:
        LangError: a call of the state failed.
    """
    for part in _growing(parts, has_ended):
        if isinstance(part, Placeholder):
            yield from text_of_call(part)
        else:
            yield None if part is None else text_of((part,))
