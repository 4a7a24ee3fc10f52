"""Heartbeats of the server's processes, and their activity by the system's files: by these the
supervisor finds a process that hangs.

A process promises something before each piece of work: the latest time of its next promise. Beside
this a thread writes the time, four times a second, whatever the process works on: a process that
was stopped is found long before its promise is broken. Both are in a file of the run directory that
both sides map into memory, so they need no message and no system call.
"""

import contextlib
import ctypes
import math
import mmap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


class _Record(ctypes.Structure):
    """Times are of ``time.monotonic()``, which all processes of a machine share."""

    _fields_ = (
        ("due_at", ctypes.c_double),  # of the promise; 0: nothing was promised yet
        ("done", ctypes.c_uint64),  # counted work
        ("beat_at", ctypes.c_double),  # 0: there was no beat
        ("recent_s", ctypes.c_double),  # the longest of the last pieces of work; 0: unknown
        ("beating", ctypes.c_uint64),  # the thread that beats
    )


def work_limit_s(step_timeout: float | None) -> float:
    """The limit of a piece of work, in seconds.

    Args:
        step_timeout: the setting; None: it is not set, 0: there is no limit.
    """
    return WORK_LIMIT_S if step_timeout is None else step_timeout or math.inf


class Heartbeat:
    """One process's record, for the process that writes it and for those that read it.

    Each of the numbers is written and read by one instruction. ``struct`` clears a record and then
    writes it byte by byte: a reader in between would see a process that is overdue.

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
        size = ctypes.sizeof(_Record)
        with path.open("a+b") as file:
            if file.tell() < size:
                file.truncate(size)
            self._file = mmap.mmap(file.fileno(), size)
        self.record = _Record.from_buffer(self._file)
        self._longest_s = 0.0

    def keep_beating(self) -> None:
        """Beat from now on, in a thread."""
        start_thread(self._beat, name="heartbeat")

    def _beat(self) -> None:
        self.record.beating = threading.get_native_id()
        while True:
            self.record.beat_at = time.monotonic()
            time.sleep(BEAT_S)

    def promise(self, within_s: float, done: int = 0) -> None:
        """Say when the next promise comes at the latest.

        Args:
            within_s: seconds from now.
            done: units of work (the scheduler counts tokens) that were finished since the last
                promise.
        """
        self.count(done)
        self.record.due_at = time.monotonic() + within_s

    def count(self, done: int) -> None:
        """Note finished units of work, and promise nothing."""
        self.record.done += done

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
        self.record.recent_s = max(FORGETTING * self.record.recent_s, seconds)

    def is_overdue(self) -> bool:
        """The process has promised something and has not kept it."""
        return 0.0 < self.record.due_at < time.monotonic()

    def is_missed(self) -> bool:
        """The process beats, and has not done so for a while."""
        return 0.0 < self.record.beat_at < time.monotonic() - MISSED_S

    @property
    def is_well(self) -> bool:
        return not (self.is_overdue() or self.is_missed())

    @property
    def has_begun(self) -> bool:
        """The process has started, and has promised something."""
        return bool(self.record.due_at)

    def close(self) -> None:
        """Close the file; the record can't be read any more."""
        del self.record
        self._file.close()


_AT_WORK = b"RDt"
"""States of a thread that runs or waits for the CPU, waits for a disk, or is held by a debugger."""


@dataclass
class Activity:
    """The activity of a process, from look to look."""

    pid: int
    _cpu_ticks: int = -1
    _main_switches: str = ""

    def is_seen(self) -> bool:
        """A thread is at work, or one was since the last look. Always true on systems without
        ``/proc``, and of a process that is gone.

        A process that a busy machine gives no time is at work by this. One that was stopped, or
        waits for itself, is not.
        """
        before = self._cpu_ticks
        try:
            process = Path(f"/proc/{self.pid}")
            self._cpu_ticks = sum(map(int, _fields(process / "stat")[11:13]))
            if self._cpu_ticks != before:
                return True
            return any(map(_is_at_work, (process / "task").iterdir()))
        except OSError:
            return True

    def is_stuck(self, beating: int) -> bool:
        """The main thread has not run since the last call, and nothing is at work for it: no other
        thread, and none of the processes that it has started, such as a compiler. Always false on
        systems without ``/proc``, and of a process that is gone.

        Args:
            beating: the thread that beats, which runs whatever the process works on.
        """
        before = self._main_switches
        try:
            process = Path(f"/proc/{self.pid}")
            status = (process / "status").read_text()
            self._main_switches = status[status.index("voluntary_ctxt_switches") :]
            if self._main_switches != before:
                return False
            threads = [t for t in (process / "task").iterdir() if int(t.name) != beating]
            return not any(map(_is_at_work, threads)) and not self._descendant_is_at_work()
        except (OSError, ValueError):
            return False

    def _descendant_is_at_work(self) -> bool:
        """Ninja starts each compiler in a group of its own, so groups do not tell."""
        parents, at_work = dict[int, int](), list[int]()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                state, parent = _fields(process / "stat")[:2]
                parents[int(process.name)] = int(parent)
                if state in _AT_WORK:
                    at_work.append(int(process.name))
        return any(self.pid in _ancestors(one, parents) for one in at_work)


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


def _is_at_work(thread: Path) -> bool:
    return _fields(thread / "stat")[0] in _AT_WORK


def _fields(stat: Path) -> list[bytes]:
    """The fields of proc_pid_stat(5) from the state on. The name before may contain anything."""
    return stat.read_bytes().rpartition(b")")[2].split()
