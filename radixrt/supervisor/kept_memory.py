"""Memory that outlives the processes of a replica: its KV pool, and the scheduler's record of it.

The supervisor holds two files without a name (memfd) and hands them to each worker and scheduler
that it starts. It knows nothing of their content.
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

    def fd(self, module: str) -> int:
        """The memory for a process: the pool for ``worker``, the record for ``scheduler``."""
        if module not in self._fds:
            self._fds[module] = os.memfd_create(f"radixrt {module}")
        return self._fds[module]

    def drop(self) -> None:
        """Let the next processes begin with new memory; the old is free when nobody maps it."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


def is_trusted_after(dead: Child, deaths: int) -> bool:
    """Whether the memory of a replica may be used after a death.

    Args:
        deaths: without a token between them: KV that is kept may be their cause.
    """
    return deaths <= 1 and dead.process.returncode not in _DAMAGING
