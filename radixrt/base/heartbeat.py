"""Heartbeats of the engine's processes, by which the supervisor finds a process that hangs.

Before each piece of work a process writes the latest time of its next heartbeat. The time is in a file of the run
directory that both sides map into memory, so a heartbeat needs no message and no system call.
"""

import math
import mmap
import time
from pathlib import Path

from radixrt.base.channels import Channels

PATIENCE = 20
"""Limit of the duration of a piece of work, in multiples of the longest before it."""

_RECORD_BYTES = 16
"""Time of ``time.monotonic()``, which all processes of a machine share; counted work."""


class Heartbeat:
    """One process's record, for the process that writes it and for those that read it.

    Each of the two numbers is written and read by one instruction. ``struct`` clears a record and then writes it byte by byte: a reader
    in between sees a time long ago, and the supervisor would kill a process that works.

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
        self._total = memoryview(self._record)[8:].cast("Q")
        self._done = 0
        self._longest_s = 0.0

    def promise(self, within_s: float, done: int = 0) -> None:
        """Say when the next promise comes at the latest.

        Args:
            within_s: seconds from now.
            done: units of work (the scheduler counts tokens) that were finished since the last promise.
        """
        self.count(done)
        self._due_at[0] = time.monotonic() + within_s

    def count(self, done: int) -> None:
        """Note finished units of work, and promise nothing."""
        self._done += done
        self._total[0] = self._done

    def promise_work(self, at_least_s: float, already_s: float = 0.0) -> None:
        """Promise to be back from a piece of work within ``at_least_s`` or, if that is more, 20 times the longest so far.

        Args:
            at_least_s: 0: promise nothing.
            already_s: time for which other work has run in a thread; it has the same limit.
        """
        limit_s = max(at_least_s, PATIENCE * self._longest_s) if at_least_s else math.inf
        self.promise(limit_s - already_s)

    def worked(self, seconds: float) -> None:
        """A piece of work took this long."""
        self._longest_s = max(self._longest_s, seconds)

    def is_overdue(self) -> bool:
        """The process has promised something and has not kept it."""
        return 0.0 < self._due_at[0] < time.monotonic()

    @property
    def has_begun(self) -> bool:
        """The process has started, and has promised something."""
        return bool(self._due_at[0])

    def close(self) -> None:
        """Close the file; the record can't be read any more."""
        self._due_at.release()
        self._total.release()
        self._record.close()

    @property
    def done(self) -> int:
        """Units of work that the process has finished since it began."""
        return self._total[0]


def is_well(channels: Channels) -> bool:
    """The processes of an engine, or of a replica, are there, and none of them hangs."""
    try:
        records = [Heartbeat(file) for file in channels.heartbeat_files()]
    except FileNotFoundError:  # the supervisor has just removed the files of a dead one
        return False
    return bool(records) and not any(record.is_overdue() for record in records)
