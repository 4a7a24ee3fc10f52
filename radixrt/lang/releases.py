"""When does a batch let go of what its ended runs have left in the cache? When nobody in it needs it any more.

A server gives up what a session alone has used, and of a prefix that runs share it can't know that another run is about to
use it. So a run is let go of when the one that came in after it, and shares most with it, has been answered: what both
began with is not the first one's alone then. The last run is not let go of: what it began with is what the next batch is
likely to begin with.
"""

import asyncio
from collections.abc import Iterable

from radixrt.lang.backends.protocol import Backend

GATHERING_S = 0.02
"""For so long ended runs are gathered, to be told of in one request."""


class Releases:
    """The runs of one batch. Lives in the runtime's event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._last: str | None = None
        self._after: dict[str, str] = {}
        """Of each run, which one came in after it."""
        self._before: dict[str, str] = {}
        self._answered: set[str] = set()
        self._ended: set[str] = set()
        self._due: list[str] = []
        self._telling: asyncio.Task[None] | None = None

    def entered(self, run_id: str) -> None:
        """A run has had its turn."""
        if self._last is not None:
            self._after[self._last] = run_id
            self._before[run_id] = self._last
        self._last = run_id

    def answered(self, run_id: str) -> None:
        """A call of a run was answered."""
        if run_id not in self._answered:
            self._answered.add(run_id)
            self._release([self._before.get(run_id)])

    def ended(self, run_id: str) -> None:
        """A run is over."""
        self._ended.add(run_id)
        self._release([run_id, self._before.get(run_id)])

    def _release(self, runs: Iterable[str | None]) -> None:
        for run_id in runs:
            after = self._after.get(run_id or "")
            if run_id in self._ended and (after in self._answered or after in self._ended):
                del self._after[run_id]
                self._due.append(run_id)
        if self._due and self._telling is None:
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        while self._due:
            await asyncio.sleep(GATHERING_S)
            due, self._due = self._due, []
            await self._backend.programs_ended(due)
        self._telling = None
