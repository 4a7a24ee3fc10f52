"""Tells from the system's files whether a process works, waits for the CPU, or sleeps."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
