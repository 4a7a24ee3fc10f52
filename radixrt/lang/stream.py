"""Runs a program in a thread and iterates over its text as it is generated."""

import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from radixrt.lang.backends.protocol import PartialValue
from radixrt.lang.errors import UnknownVariable
from radixrt.lang.runtime.reading import Item, Pieces, TextSoFar, text_of_state
from radixrt.lang.state import State


class Stream:
    """The text of a program's state in pieces: appended text and generated text.

    Leaving the loop or the ``with`` block before the end cancels the program's calls.
    """

    def __init__(self, state: State, program: Callable[[], Any]) -> None:
        self.state = state
        """The state of the program, which may still run."""
        self._changes = state._run.changes
        state._run.is_watched = True
        self._program = program
        self._error: BaseException | None = None
        self._ended = threading.Event()
        context = contextvars.copy_context()  # a program inside another one uses its backend
        threading.Thread(target=context.run, args=(self._run,), daemon=True).start()

    def __iter__(self) -> Iterator[str]:
        """Raises the error that ended the program."""
        try:
            yield from Pieces(self._text(), self._changes)
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for piece in Pieces(self._text(), self._changes):
                yield piece
        finally:
            self.close()

    def text_iter(self, name: str) -> Iterator[str]:
        """The pieces of one variable's text; waits until the program creates the variable.

        Raises:
            UnknownVariable: the program ended without the variable.
        """
        return iter(Pieces(self._text_of(name), self._changes))

    def text_aiter(self, name: str) -> AsyncIterator[str]:
        """:meth:`text_iter` for ``async for``."""
        return aiter(Pieces(self._text_of(name), self._changes))

    def values_iter(self, name: str) -> Iterator[PartialValue]:
        """:meth:`State.values_iter` of a variable; waits until the program creates the variable.

        Raises:
            UnknownVariable: the program ended without the variable.
        """
        return iter(Pieces(self._when_there(name, self.state._values_of), self._changes))

    def close(self) -> None:
        """Cancel the program's calls. A second call does nothing."""
        if not self._ended.is_set():
            self.state._run.cancel()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _text(self) -> TextSoFar:
        yield from text_of_state(lambda: self.state._transcript.parts(), self._ended.is_set)
        self._raise_error()

    def _text_of(self, name: str) -> TextSoFar:
        return self._when_there(name, self.state._text_of)

    def _when_there(
        self, name: str, read: Callable[[str], Iterator[Item | None]]
    ) -> Iterator[Item | None]:
        """Read a variable once the program has created it."""
        while True:
            has_ended = self._ended.is_set()
            if name in self.state:
                yield from read(name)
                return
            if has_ended:
                self._raise_error()
                raise UnknownVariable(f"The program ended without a variable {name!r}.")
            yield None

    def _run(self) -> None:
        try:
            self._program()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            self._changes.increment()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
