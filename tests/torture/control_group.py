"""A control group of Linux, in which processes have no more memory than it says."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class ControlGroup:
    """A memory group of the first or the second version, below that of this process."""

    def __init__(self, megabytes: int) -> None:
        """
        Raises:
            OSError: this process may not make one.
        """
        is_second = (ROOT / "cgroup.controllers").exists()
        lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        (own,) = (path for _, name, path in lines if name == ("" if is_second else "memory"))
        self._own = (ROOT if is_second else ROOT / "memory") / own.lstrip("/")
        self._folder = self._own / f"radixrt-{os.getpid()}"
        limit, self._peak, self._events = (
            ("memory.max", "memory.peak", "memory.events")
            if is_second
            else ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
        )
        self._folder.mkdir()
        try:
            (self._folder / limit).write_text(str(megabytes << 20))
        except OSError:
            self._folder.rmdir()
            raise

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Processes that begin in the block belong to the group, and those that they start."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._own / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_mb(self) -> float:
        """The most memory that its processes had together, with the files that were cached for
        them."""
        return int((self._folder / self._peak).read_text()) / (1 << 20)

    @property
    def deaths(self) -> int:
        """Processes that were killed because the memory ran out."""
        events = dict(line.split() for line in (self._folder / self._events).open())
        return int(events["oom_kill"])

    def remove(self) -> None:
        """Once no process is left in it, which the kernel sees a little later than others."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.1)
