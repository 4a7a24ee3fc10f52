"""What stands in a transcript where the model has not spoken yet? A hole: its text comes, then its value."""

import concurrent.futures
from dataclasses import dataclass
from typing import Any

from radixrt.lang.background import settled
from radixrt.lang.errors import Cancelled, LangError
from radixrt.lang.records import CallRecord


@dataclass(frozen=True)
class Filling:
    """What a hole was filled with."""

    text: str
    value: Any
    tool_calls: tuple[dict[str, Any], ...] = ()
    """In OpenAI's form."""
    finish_reason: str | None = None
    reasoning: str = ""
    """What the model thought before it; no part of the text."""


class Hole:
    """The place of one gen or select. The runtime's event loop writes it, everyone reads it."""

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self.pieces: list[str] = []
        """Its text so far."""
        self.error_was_seen = False
        """The program has met this hole's error."""
        self.future: concurrent.futures.Future[Filling] = concurrent.futures.Future()
        """Ends when it is filled, or can't be."""

    @property
    def filling(self) -> Filling:
        """Of a filled hole."""
        return self.future.result(timeout=0)

    def wait(self) -> Filling:
        """Raises:
        LangError: whatever kept it from being filled; a Cancelled among them.
        """
        concurrent.futures.wait([self.future])
        return self._outcome()

    async def wait_async(self) -> Filling:
        """The same without blocking the event loop."""
        await settled(self.future)
        return self._outcome()

    def read(self) -> Filling:
        """As :meth:`wait`, for the program itself."""
        filling = self.wait()
        self.record.was_read()
        return filling

    async def read_async(self) -> Filling:
        """As :meth:`wait_async`, for the program itself."""
        filling = await self.wait_async()
        self.record.was_read()
        return filling

    def _outcome(self) -> Filling:
        try:
            return self.filling
        except concurrent.futures.CancelledError:
            cancelled = Cancelled(f"{self.record.what} was cancelled before it had a value.")
            cancelled.source = self.record.source
            raise cancelled from None
        except Exception as error:
            self.error_was_seen = True
            if not isinstance(error, LangError):
                raise
            # The frames inside this package that led to it say nothing about the program.
            raise error.with_traceback(None) from error.__cause__
