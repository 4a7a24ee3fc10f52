"""Which runs does a trace show? All that begin while it records, in whatever thread."""

import threading
from contextlib import ContextDecorator
from pathlib import Path

from radixrt.lang.records import RunRecord
from radixrt.lang.tracing.trace import Trace

_recording: "list[Recorder]" = []
_lock = threading.Lock()


class Recorder(ContextDecorator):
    """``with rl.trace("out.html"):`` records all runs that begin inside, and writes the page at the end, also after
    an error. Without ``with``: :meth:`start` and :meth:`stop`."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path
        self._runs: list[RunRecord] = []

    def start(self) -> "Recorder":
        with _lock:
            _recording.append(self)
        return self

    def stop(self) -> Trace:
        """Record no more, and write the page if there is a path for it."""
        with _lock:
            _recording.remove(self)
        trace = self.trace()
        if self.path is not None:
            trace.save(self.path)
        return trace

    def trace(self) -> Trace:
        """What was recorded so far."""
        with _lock:
            return Trace(list(self._runs))

    def __enter__(self) -> "Recorder":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def tell_recorders(run: RunRecord) -> None:
    """A run begins."""
    with _lock:
        for recorder in _recording:
            recorder._runs.append(run)
