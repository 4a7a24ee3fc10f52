"""Tells from the system's files whether a process works, waits for the CPU, or sleeps."""

from dataclasses import dataclass
from pathlib import Path

_AT_WORK = b"RDt"
"""States of a thread that runs or waits for the CPU, waits for a disk, or is held by a debugger."""


@dataclass
class Activity:
    """The activity of a process, from look to look."""

    pid: int
    _cpu_ticks: int = -1

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
            threads = [_fields(thread / "stat")[0] for thread in (process / "task").iterdir()]
        except OSError:
            return True
        return any(state in _AT_WORK for state in threads)


def _fields(stat: Path) -> list[bytes]:
    """The fields of proc_pid_stat(5) from the state on. The name before may contain anything."""
    return stat.read_bytes().rpartition(b")")[2].split()
