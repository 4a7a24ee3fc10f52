"""What belongs to one run of a program? Its backend and settings, its calls under way, and how they end."""

import concurrent.futures
import contextlib
import contextvars
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from radixrt.lang.backends.protocol import Backend, Prompt
from radixrt.lang.background import BACKGROUND, settled
from radixrt.lang.batch_gate import BatchGate
from radixrt.lang.changes import Changes
from radixrt.lang.errors import Cancelled
from radixrt.lang.hole import Filling, Hole
from radixrt.lang.records import CallRecord, RunRecord
from radixrt.lang.sampling import Sampling

CURRENT_RUN: contextvars.ContextVar["Run | None"] = contextvars.ContextVar(
    "current run", default=None
)
"""The run that this thread or task is inside of: programs run from there use the same backend."""


class Run:
    """One run of a program. Its forks, and the functions it calls on its state, are part of it."""

    def __init__(
        self,
        backend: Backend,
        sampling: Sampling,
        gate: BatchGate | None,
        name: str,
        outer: "Run | None",
    ) -> None:
        """
        Args:
            gate: of the batch that it is part of.
            outer: the run whose program began this one: this one's calls take the place that the outer one has in a batch,
                and end with it.
        """
        self.id = uuid.uuid4().hex
        self.backend = backend
        self.sampling = sampling
        self.record = RunRecord(name)
        self.changes = Changes()
        self.is_watched = False
        """Someone reads along, so that answers are to come piece by piece."""
        self._gate = gate
        self._outer = outer
        self._lock = threading.Lock()
        self._holes: list[Hole] = []
        self._inner: weakref.WeakSet[Run] = weakref.WeakSet()
        self._cancelled = False
        self._has_ended = False
        if outer is not None:
            outer._began(self)

    def start(self, hole: Hole, work: Coroutine[Any, Any, Filling]) -> None:
        """Fill a hole in the background.

        Raises:
            Cancelled: the run was.
        """
        with self._lock:
            if self._cancelled:
                work.close()
                raise Cancelled("This run was cancelled, so nothing more can be generated in it.")
            hole.future = BACKGROUND.submit(work)
            self._holes.append(hole)
        hole.future.add_done_callback(lambda _: self.changes.tell())

    @contextlib.asynccontextmanager
    async def admission(self, prompt: Prompt, record: CallRecord) -> AsyncIterator[None]:
        """A block to send a call in. The first calls of a run in a batch wait for its turn, all others begin at once.

        The batch of the run itself comes first, then those of the runs around it. None of these waits for one further in, so
        they can't wait for each other.
        """
        async with contextlib.AsyncExitStack() as entered:
            run: Run | None = self
            while run is not None:
                if run._gate is not None and not run._has_ended:
                    await entered.enter_async_context(run._gate.admission(run.id, prompt, record))
                run = run._outer
            yield

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """The program's code runs inside the block. An error in it cancels what it has under way."""
        token = CURRENT_RUN.set(self)
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        finally:
            CURRENT_RUN.reset(token)
            self._has_ended = True
            self.record.ended_at = time.monotonic()
            self.changes.tell()

    def finish(self) -> None:
        """Wait for all that was started.

        Raises:
            LangError: the first failure that the program has not met itself.
        """
        concurrent.futures.wait([hole.future for hole in self._holes])
        self._raise_unseen()

    async def finish_async(self) -> None:
        """The same without blocking the event loop."""
        for hole in list(self._holes):
            await settled(hole.future)
        self._raise_unseen()

    def cancel(self) -> None:
        """Give up all calls under way; the servers drop them."""
        with self._lock:
            self._cancelled = True
            holes, inner = list(self._holes), list(self._inner)
        for hole in holes:
            hole.future.cancel()
        for run in inner:
            run.cancel()

    def _began(self, inner: "Run") -> None:
        """The program of this run began another."""
        with self._lock:
            self._inner.add(inner)
            cancelled = self._cancelled
        if cancelled:
            inner.cancel()

    def _raise_unseen(self) -> None:
        for hole in self._holes:
            if not hole.future.cancelled() and not hole.error_was_seen:
                hole.wait()
