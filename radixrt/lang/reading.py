"""How is text read while it is still being written? Piece by piece, from a variable or from a whole state."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from radixrt.lang.changes import Changes
from radixrt.lang.hole import Hole
from radixrt.lang.transcript import Part

TextSoFar = Iterator[str | None]
"""Pieces as they are found; None: there are no more of them yet."""


class Pieces:
    """A text for threads and for event loops, which wait where there is nothing yet."""

    def __init__(self, text: TextSoFar, changes: Changes) -> None:
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


def text_of_hole(hole: Hole) -> TextSoFar:
    """Raises:
    LangError: the hole could not be filled.
    """
    num_read = 0
    while True:
        is_all = hole.future.done()
        pieces = hole.pieces[num_read:]
        num_read += len(pieces)
        yield from pieces
        if is_all:
            hole.wait()
            return
        if not pieces:
            yield None


def text_of_state(parts: Callable[[], Sequence[Part]], has_ended: Callable[[], bool]) -> TextSoFar:
    """Of a state that a program still writes.

    Raises:
        LangError: a hole in it could not be filled.
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
                yield from text_of_hole(part)
        if is_all:
            return
        if not new:
            yield None
