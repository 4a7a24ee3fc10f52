"""How does one watch a program run? As an iterator over its text, with the state within reach."""

import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

from radixrt.lang.errors import UnknownVariable
from radixrt.lang.reading import Pieces, StateCursor
from radixrt.lang.state import State


class Stream:
    """The text of a program's state, piece by piece: what it appends, and what the model says.

    Leaving the loop (or the ``with`` block) before the end cancels the program's calls.
    """

    def __init__(self, state: State, program: Callable[[], Any]) -> None:
        self.state = state
        """What there is so far."""
        state._run.is_watched = True
        self._program = program
        self._error: BaseException | None = None
        self._ended = threading.Event()
        context = contextvars.copy_context()  # a program run from another one uses its backend
        threading.Thread(target=context.run, args=(self._run,), daemon=True).start()

    def __iter__(self) -> Iterator[str]:
        """Raises:
        Exception: whatever ended the program.
        """
        try:
            yield from self._pieces()
            self._raise_error()
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for piece in self._pieces():
                yield piece
            self._raise_error()
        finally:
            self.close()

    def text_iter(self, name: str) -> Iterator[str]:
        """The pieces of one variable. Waits until the program gets there.

        Raises:
            UnknownVariable: the program ended without it.
        """
        changes = self.state._run.changes
        while True:
            seen, ended = changes.count, self._ended.is_set()
            if name in self.state:
                yield from self.state.text_iter(name)
                return
            if ended:
                self._raise_error()
                raise UnknownVariable(f"The program ended without a variable {name!r}.")
            changes.wait(seen)

    async def text_aiter(self, name: str) -> AsyncIterator[str]:
        """As :meth:`text_iter`, for ``async for``."""
        changes = self.state._run.changes
        while True:
            seen, ended = changes.count, self._ended.is_set()
            if name in self.state:
                async for piece in self.state.text_aiter(name):
                    yield piece
                return
            if ended:
                self._raise_error()
                raise UnknownVariable(f"The program ended without a variable {name!r}.")
            await changes.wait_async(seen)

    def close(self) -> None:
        """Cancel what is under way. May be called twice."""
        if not self._ended.is_set():
            self.state._run.cancel()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _pieces(self) -> Pieces:
        cursor = StateCursor(self.state._parts, self._ended.is_set)
        return Pieces(cursor, self.state._run.changes)

    def _run(self) -> None:
        try:
            self._program()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            self.state._run.changes.tell()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
