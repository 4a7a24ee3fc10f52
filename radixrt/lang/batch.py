"""How do many runs go side by side? Each in a thread, its first call held back until its turn comes."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from radixrt.lang.backends.protocol import Backend
from radixrt.lang.batch_gate import BatchGate
from radixrt.lang.run import Run
from radixrt.lang.state import State

DEFAULT_CONCURRENCY = 64
NUM_LOOKED_AT = 512
"""Runs that are begun ahead of their turn, so that there is something to put in order. Each holds a thread."""


class FailedRun:
    """Stands in the place of a state whose run raised an error. Every access raises that error.

    Attributes:
        error: what was raised.
        state: what there is of the run, such as variables that it had computed.
    """

    def __init__(self, error: BaseException, state: State) -> None:
        self.error = error
        self.state = state

    def __repr__(self) -> str:
        return f"FailedRun({self.error!r})"

    def __getitem__(self, name: str) -> NoReturn:
        raise self.error

    def __getattr__(self, name: str) -> NoReturn:
        """All that a state has."""
        if hasattr(State, name) or name == "result":
            raise self.error
        raise AttributeError(f"A failed run, as a state, has no {name!r}.")


BatchResult = State | FailedRun
Begin = Callable[[Any, BatchGate], tuple[State, Callable[[], State]]]
"""From arguments and a gate: the state of a new run, and what to call to have it finished."""


class Batch:
    """One run for each input."""

    def __init__(
        self,
        begin: Begin,
        inputs: Sequence[Any],
        backend: Backend,
        concurrency: int | None,
        num_threads: int | None,
        title: str | None,
    ) -> None:
        """
        Args:
            backend: what answers them.
            concurrency: most runs that may have calls under way.
            num_threads: most runs whose program's own code may be under way, waiting or not; by default as many as help to
                put the first calls in order.
            title: of the progress bar; None: there is none.
        """
        concurrency = concurrency or DEFAULT_CONCURRENCY
        self._begin = begin
        self._inputs = inputs
        self._title = title
        self._num_threads = min(len(inputs), num_threads or max(concurrency, NUM_LOOKED_AT))
        self._gate = BatchGate(backend, self._num_threads, concurrency)
        self._lock = threading.Lock()
        self._futures: list[Future[BatchResult]] = []
        self._under_way: set[Run] = set()
        self._cancelled = False

    def run(self) -> list[BatchResult]:
        """The results in the order of the inputs."""
        if not self._inputs:
            return []
        try:
            with ThreadPoolExecutor(self._num_threads, "radixrt-program") as threads:
                try:
                    for arguments in self._inputs:
                        self._futures.append(threads.submit(self._run_one, arguments))
                    _show_progress(self._futures, self._title)
                except BaseException:  # Ctrl-C, most likely
                    self.cancel()
                    raise
        finally:
            self._gate.end()
        return [future.result() for future in self._futures]

    def cancel(self) -> None:
        """Give up what is under way, and what has not begun. From any thread."""
        self._gate.close()
        with self._lock:
            self._cancelled = True
            for future in self._futures:
                future.cancel()
            for run in self._under_way:
                run.cancel()

    def _run_one(self, arguments: Any) -> BatchResult:
        state, finish = self._begin(arguments, self._gate)
        run = state._run
        with self._lock:
            self._under_way.add(run)
            if self._cancelled:
                run.cancel()
        try:
            return finish()
        except Exception as error:
            return FailedRun(error, state)
        finally:
            self._gate.leave(run.id)
            with self._lock:
                self._under_way.discard(run)


def _show_progress(futures: list[Future[BatchResult]], title: str | None) -> None:
    """Wait for all, with a progress bar where ``rich`` is installed and someone looks."""
    try:
        from rich import console, progress
    except ImportError:
        title = None
    if title is None:
        concurrent.futures.wait(futures)
        return
    screen = console.Console(stderr=True)
    with progress.Progress(
        progress.TextColumn(title), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(), transient=True, console=screen, disable=not screen.is_terminal,
    ) as bar:  # fmt: skip
        for _ in bar.track(concurrent.futures.as_completed(futures), len(futures)):
            pass
