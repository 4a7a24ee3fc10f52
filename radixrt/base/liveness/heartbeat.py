"""Heartbeats of the server's processes, by which the supervisor finds a process that hangs.

A process promises something before each piece of work: the latest time of its next promise. Beside
this a thread writes the time, four times a second, whatever the process works on: a process that
was stopped is found long before its promise is broken. Both are in a file of the run directory that
both sides map into memory, so they need no message and no system call.
"""

import math
import mmap
import threading
import time
from pathlib import Path

from radixrt.base.liveness.supervision import start_thread

WORK_LIMIT_S = 30.0
"""Limit of a piece of work, if ``--step-timeout`` sets none."""

PATIENCE = 20
"""Limit of the duration of a piece of work, in multiples of the longest before it."""

BEAT_S = 0.25
"""Between two beats."""

MISSED_S = 1.0
"""Time without a beat after which a process is not ready."""

FORGETTING = 0.98
"""Share of the longest step that counts after a further step."""

_RECORD_BYTES = 40
"""Times of ``time.monotonic()``, which all processes of a machine share, of the promise and of the
last beat; counted work; the longest of the last steps; the thread that beats."""


def work_limit_s(step_timeout: float | None) -> float:
    """The limit of a piece of work, in seconds.

    Args:
        step_timeout: the setting; None: it is not set, 0: there is no limit.
    """
    return WORK_LIMIT_S if step_timeout is None else step_timeout or math.inf


class Heartbeat:
    """One process's record, for the process that writes it and for those that read it.

    Each of the numbers is written and read by one instruction. ``struct`` clears a record and then
    writes it byte by byte: a reader in between sees a time long ago, and the supervisor would kill
    a process that works.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "heartbeat"
    >>> worker, supervisor = Heartbeat(path), Heartbeat(path)
    >>> supervisor.is_overdue()  # nothing was promised yet
    False
    >>> worker.promise(within_s=-1.0)
    >>> supervisor.is_overdue()
    True
    """

    def __init__(self, path: Path) -> None:
        """Open the record, and make it if it is not there."""
        with path.open("a+b") as file:
            if file.tell() < _RECORD_BYTES:
                file.truncate(_RECORD_BYTES)
            self._record = mmap.mmap(file.fileno(), _RECORD_BYTES)
        self._due_at = memoryview(self._record)[:8].cast("d")
        self._total = memoryview(self._record)[8:16].cast("Q")
        self._beat_at = memoryview(self._record)[16:24].cast("d")
        self._recent_s = memoryview(self._record)[24:32].cast("d")
        self._beating = memoryview(self._record)[32:].cast("Q")
        self._done = 0
        self._longest_s = 0.0

    def keep_beating(self) -> None:
        """Beat from now on, in a thread."""
        start_thread(self._beat, name="heartbeat")

    def _beat(self) -> None:
        self._beating[0] = threading.get_native_id()
        while True:
            self._beat_at[0] = time.monotonic()
            time.sleep(BEAT_S)

    def promise(self, within_s: float, done: int = 0) -> None:
        """Say when the next promise comes at the latest.

        Args:
            within_s: seconds from now.
            done: units of work (the scheduler counts tokens) that were finished since the last
                promise.
        """
        self.count(done)
        self._due_at[0] = time.monotonic() + within_s

    def count(self, done: int) -> None:
        """Note finished units of work, and promise nothing."""
        self._done += done
        self._total[0] = self._done

    def promise_work(self, at_least_s: float, already_s: float = 0.0) -> None:
        """Promise to be back from a piece of work within ``at_least_s`` or, if that is more, 20
        times the longest so far.

        Args:
            at_least_s: infinity: promise nothing.
            already_s: time for which other work has run in a thread; it has the same limit.
        """
        self.promise(max(at_least_s, PATIENCE * self._longest_s) - already_s)

    def worked(self, seconds: float) -> None:
        """A piece of work took this long."""
        self._longest_s = max(self._longest_s, seconds)
        self._recent_s[0] = max(FORGETTING * self._recent_s[0], seconds)

    def is_overdue(self) -> bool:
        """The process has promised something and has not kept it."""
        return 0.0 < self.due_at < time.monotonic()

    def is_missed(self) -> bool:
        """The process beats, and has not done so for a while."""
        return 0.0 < self.beat_at < time.monotonic() - MISSED_S

    @property
    def is_well(self) -> bool:
        return not (self.is_overdue() or self.is_missed())

    @property
    def due_at(self) -> float:
        """Latest time of the next promise; 0: nothing was promised yet."""
        return self._due_at[0]

    @property
    def beat_at(self) -> float:
        """Time of the last beat; 0: there was none."""
        return self._beat_at[0]

    @property
    def recent_s(self) -> float:
        """Duration of the longest of the last pieces of work; 0: unknown."""
        return self._recent_s[0]

    @property
    def beating(self) -> int:
        """Id of the thread that beats."""
        return self._beating[0]

    @property
    def has_begun(self) -> bool:
        """The process has started, and has promised something."""
        return bool(self._due_at[0])

    def close(self) -> None:
        """Close the file; the record can't be read any more."""
        for field in (self._due_at, self._total, self._beat_at, self._recent_s, self._beating):
            field.release()
        self._record.close()

    @property
    def done(self) -> int:
        """Units of work that the process has finished since it began."""
        return self._total[0]
