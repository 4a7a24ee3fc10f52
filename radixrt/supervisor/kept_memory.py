"""Memory that outlives the processes of a replica: its KV pool, and the scheduler's record of it.

The supervisor holds files without a name (memfd), one for each worker and one for the scheduler, and
hands them to those that it starts. It knows nothing of their content.
"""

import os
import signal

from radixrt.supervisor.child import Child

_DAMAGING = {
    -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE,
}  # fmt: skip
"""Exit statuses of processes that may have written where they should not."""


class KeptMemory:
    """The memory of one replica. It has no size until a process gives it one."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def fd(self, name: str) -> int:
        """The memory for a process: its part of the pool for a worker, the record for the
        scheduler."""
        if name not in self._fds:
            self._fds[name] = os.memfd_create(f"radixrt {name}")
        return self._fds[name]

    def drop(self) -> None:
        """Let the next processes begin with new memory; the old is free when nobody maps it."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


def is_trusted_after(members: list[Child], deaths: int) -> bool:
    """Whether the memory of a replica may be used after a death.

    Args:
        members: the replica's processes. A rank whose connection breaks may be seen to end before
            the one that has broken it.
        deaths: without a token between them: KV that is kept may be their cause.
    """
    return deaths <= 1 and all(one.process.poll() not in _DAMAGING for one in members)
