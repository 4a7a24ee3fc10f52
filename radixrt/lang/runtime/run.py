"""One run of a program: its backend and settings, its calls under way, and their end."""

import concurrent.futures
import contextlib
import contextvars
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from radixrt.lang.backends.protocol import Backend, Prompt, Sampling
from radixrt.lang.errors import Cancelled
from radixrt.lang.runtime.admission import BatchAdmission
from radixrt.lang.runtime.placeholder import BACKGROUND, Completion, Placeholder, settled
from radixrt.lang.runtime.reading import ChangeCounter
from radixrt.lang.tracing.records import CallRecord, RunRecord

CURRENT_RUN: contextvars.ContextVar["Run | None"] = contextvars.ContextVar(
    "current run", default=None
)
"""The run whose program this thread or task executes; programs that it runs use the same
backend."""


class Run:
    """One run of a program. Its forks, and the functions it calls on its state, are part of it."""

    def __init__(
        self,
        backend: Backend,
        sampling: Sampling,
        batch: BatchAdmission | None,
        name: str,
        outer: "Run | None",
    ) -> None:
        """
        Args:
            batch: the admission of the batch that this run is part of.
            outer: the run whose program began this one. Calls of this run count as calls of the
                outer one in its batch, and are cancelled with it.
        """
        self.id = uuid.uuid4().hex
        self.backend = backend
        self.sampling = sampling
        self.record = RunRecord(name)
        self.changes = ChangeCounter()
        self.is_watched = False
        """The text is read while it is generated, so that answers are streamed."""
        self._batch = batch
        self._outer = outer
        self._lock = threading.Lock()
        self._placeholders: list[Placeholder] = []
        self._inner: weakref.WeakSet[Run] = weakref.WeakSet()
        self._cancelled = False
        self._has_ended = False
        if outer is not None:
            outer._began(self)

    def start(self, placeholder: Placeholder, work: Coroutine[Any, Any, Completion]) -> None:
        """Execute a call in the background; its result fills the placeholder.

        Raises:
            Cancelled: the run was.
        """
        with self._lock:
            if self._cancelled:
                work.close()
                raise Cancelled("This run was cancelled, so nothing more can be generated in it.")
            placeholder.future = BACKGROUND.submit(work)
            self._placeholders.append(placeholder)
        placeholder.future.add_done_callback(lambda _: self.changes.increment())

    def start_aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do in the background what no value depends on, and nobody waits for."""
        BACKGROUND.submit(work)

    @contextlib.asynccontextmanager
    async def admission(self, prompt: Prompt, record: CallRecord) -> AsyncIterator[None]:
        """A block to send a call in. The first calls of a run in a batch wait for its admission;
        all others begin at once.

        The run's own batch admits first, then the batches of the runs around it. No batch waits for
        one inside it, so there is no deadlock.
        """
        async with contextlib.AsyncExitStack() as entered:
            run: Run | None = self
            while run is not None:
                if run._batch is not None and not run._has_ended:
                    await entered.enter_async_context(run._batch.admission(run.id, prompt, record))
                run = run._outer
            yield

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """A block for the program's code. An error inside it cancels the calls under way."""
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
            self.changes.increment()

    def finish(self) -> None:
        """Wait for all calls.

        Raises:
            LangError: the first failure that the program has not seen.
        """
        concurrent.futures.wait([placeholder.future for placeholder in self._placeholders])
        self._raise_unseen()

    async def finish_async(self) -> None:
        """:meth:`finish` without blocking the event loop."""
        for placeholder in list(self._placeholders):
            await settled(placeholder.future)
        self._raise_unseen()

    def cancel(self) -> None:
        """Cancel all calls under way; the servers drop them."""
        with self._lock:
            self._cancelled = True
            placeholders, inner = list(self._placeholders), list(self._inner)
        for placeholder in placeholders:
            placeholder.future.cancel()
        for run in inner:
            run.cancel()

    def _began(self, inner: "Run") -> None:
        """The program of this run began another run."""
        with self._lock:
            self._inner.add(inner)
            cancelled = self._cancelled
        if cancelled:
            inner.cancel()

    def _raise_unseen(self) -> None:
        for placeholder in self._placeholders:
            if not placeholder.future.cancelled() and not placeholder.error_was_seen:
                placeholder.wait()
