"""What stands in a transcript where the model has not spoken yet? A hole: its text comes, then its value."""

import asyncio
import concurrent.futures
from dataclasses import dataclass
from typing import Any

from radixrt.lang.background import outcome
from radixrt.lang.errors import Cancelled, LangError
from radixrt.lang.records import CallRecord
from radixrt.lang.source_line import SourceLine


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

    def __init__(self, name: str | None, what: str, source: SourceLine, record: CallRecord) -> None:
        """
        Args:
            what: for errors, such as ``gen("verdict")``.
        """
        self.name = name
        self.what = what
        self.source = source
        self.record = record
        self.pieces: list[str] = []
        """Its text so far."""
        self.error_was_seen = False
        """The program has met this hole's error."""
        self._future: concurrent.futures.Future[Filling] | None = None

    def filled_by(self, future: "concurrent.futures.Future[Filling]") -> None:
        self._future = future

    @property
    def future(self) -> "concurrent.futures.Future[Filling]":
        assert self._future is not None
        return self._future

    @property
    def is_settled(self) -> bool:
        """Filled, failed or cancelled."""
        return self._future is not None and self._future.done()

    @property
    def filling(self) -> Filling:
        """Of a filled hole."""
        return self.future.result(timeout=0)

    def wait(self) -> Filling:
        """Raises:
        LangError: whatever kept it from being filled; a Cancelled among them.
        """
        try:
            return self.future.result()
        except concurrent.futures.CancelledError:
            raise self._cancelled() from None
        except LangError as error:
            self.error_was_seen = True
            raise _without_detours(error) from error.__cause__
        except Exception:
            self.error_was_seen = True
            raise

    async def wait_async(self) -> Filling:
        """The same without blocking the event loop."""
        try:
            return await outcome(self.future)
        except asyncio.CancelledError:
            if not self.future.cancelled():
                raise  # whoever waits was cancelled, not this
            raise self._cancelled() from None
        except LangError as error:
            self.error_was_seen = True
            raise _without_detours(error) from error.__cause__
        except Exception:
            self.error_was_seen = True
            raise

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

    def cancel(self) -> None:
        self.future.cancel()

    def _cancelled(self) -> Cancelled:
        error = Cancelled(f"{self.what} was cancelled before it had a value.")
        error.source = self.source
        return error


def _without_detours(error: LangError) -> LangError:
    """Without the frames inside this package that led to it: they say nothing about the program."""
    return error.with_traceback(None)
