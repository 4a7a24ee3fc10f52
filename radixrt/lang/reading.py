"""How is text read while it is still being written? Piece by piece, from a variable or from a whole state."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from radixrt.lang.changes import Changes
from radixrt.lang.hole import Hole
from radixrt.lang.transcript import Part


class HoleCursor:
    """A place in the text of a hole."""

    def __init__(self, hole: Hole) -> None:
        self._hole = hole
        self._num_read = 0

    def take(self) -> tuple[list[str], bool]:
        """What is new, and whether that is all there will be.

        Raises:
            LangError: the hole could not be filled.
        """
        settled = self._hole.is_settled
        if pieces := self._hole.pieces[self._num_read :]:
            self._num_read += len(pieces)
            return pieces, False
        if settled:
            self._hole.wait()
        return [], settled


class StateCursor:
    """A place in the text of a state that a program still writes."""

    def __init__(self, parts: Callable[[], Sequence[Part]], ended: Callable[[], bool]) -> None:
        self._parts = parts
        self._ended = ended
        self._num_done = 0
        self._hole: HoleCursor | None = None

    def take(self) -> tuple[list[str], bool]:
        """As :meth:`HoleCursor.take`."""
        ended = self._ended()
        parts = self._parts()
        pieces: list[str] = []
        while self._num_done < len(parts):
            part = parts[self._num_done]
            if isinstance(part, str):
                pieces.append(part)
            elif pieces:
                return pieces, False
            else:
                self._hole = self._hole or HoleCursor(part)
                new, settled = self._hole.take()
                if not settled:
                    return new, False
                self._hole = None
            self._num_done += 1
        return pieces, ended


class Pieces:
    """An iterable of what a cursor finds, for threads and for event loops."""

    def __init__(self, cursor: HoleCursor | StateCursor, changes: Changes) -> None:
        self._cursor = cursor
        self._changes = changes

    def __iter__(self) -> Iterator[str]:
        while True:
            seen = self._changes.count
            pieces, is_all = self._cursor.take()
            yield from pieces
            if is_all:
                return
            if not pieces:
                self._changes.wait(seen)

    async def __aiter__(self) -> AsyncIterator[str]:
        while True:
            seen = self._changes.count
            pieces, is_all = self._cursor.take()
            for piece in pieces:
                yield piece
            if is_all:
                return
            if not pieces:
                await self._changes.wait_async(seen)


def hole_pieces(hole: Hole, changes: Changes) -> Pieces:
    return Pieces(HoleCursor(hole), changes)
