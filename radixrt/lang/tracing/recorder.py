"""Collects the records of runs into traces, and saves traces."""

import json
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any

from radixrt.lang.tracing.chrome import chrome_trace
from radixrt.lang.tracing.records import CallRecord, RunRecord
from radixrt.lang.tracing.text import text_of

_recording: "list[Recorder]" = []
_lock = threading.Lock()


class Trace:
    """A timeline of one run or several.

    ``print(trace)`` shows it as text. :meth:`save` writes Chrome trace events for ui.perfetto.dev
    or chrome://tracing.

    >>> print(Trace([]))
    nothing · 0 runs · 0 ms · 0 calls · 0 branches · 0 tokens in (0 cached) · 0 out
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = list(runs)
        self.made_at = time.monotonic()
        """End of the trace for unfinished calls, in seconds of ``time.monotonic()``."""

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of all runs, each run's in program order."""
        return [call for run in self.runs for call in run.calls]

    def data(self) -> dict[str, Any]:
        """The trace as Chrome trace events: the JSON object that :meth:`save` writes. Times are in
        microseconds."""
        return chrome_trace(self.runs, self.made_at)

    def save(self, path: str | Path) -> None:
        """Write the trace events as JSON.

        A path that ends in ``.html``, as earlier versions wrote, gives a warning and the same name
        with ``.json``.
        """
        path = Path(path)
        if path.suffix in (".html", ".htm"):
            path = path.with_suffix(".json")
            message = f"Traces are Chrome trace events now: {path} was written; open it in ui.perfetto.dev."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        path.write_text(json.dumps(self.data(), separators=(",", ":")), encoding="utf-8")

    def __str__(self) -> str:
        return text_of(self.runs, self.made_at)

    __repr__ = __str__


class Recorder(ContextDecorator):
    """Records all runs that begin inside ``with rl.trace("out.json"):``, in any thread, and saves
    them at the end.

    They are saved also after an error. Without ``with``: :meth:`start` and :meth:`stop`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """
        Args:
            path: the file for :meth:`Trace.save`; None: nothing is written.
        """
        self.path = path
        self._runs: list[RunRecord] = []

    def start(self) -> "Recorder":
        with _lock:
            _recording.append(self)
        return self

    def stop(self) -> Trace:
        """Record no more runs, and save the trace if there is a path."""
        with _lock:
            _recording.remove(self)
        trace = self.trace()
        if self.path is not None:
            trace.save(self.path)
        return trace

    def trace(self) -> Trace:
        """The runs that were recorded so far."""
        with _lock:
            return Trace(list(self._runs))

    def __enter__(self) -> "Recorder":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def tell_recorders(run: RunRecord) -> None:
    """Add a run that begins to all recorders."""
    with _lock:
        for recorder in _recording:
            recorder._runs.append(run)
