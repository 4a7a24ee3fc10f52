"""How do many runs go side by side? Each in a thread, its first call held back until its turn comes."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from radixrt.lang.backends.protocol import Backend
from radixrt.lang.batch_gate import BatchGate
from radixrt.lang.run import Gate, Run
from radixrt.lang.state import State

DEFAULT_CONCURRENCY = 64
NUM_LOOKED_AT = 512
"""Runs that are begun ahead of their turn, so that there is something to put in order. Each holds a thread."""


class FailedRun:
    """Stands in the place of a state whose run raised an error. Every access raises that error.

    Attributes:
        error: what was raised.
        state: what there is of the run, such as variables that it had computed; None if it never began.
    """

    def __init__(self, error: BaseException, state: State | None = None) -> None:
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
Begin = Callable[[Any, Gate], tuple[State, Callable[[], State]]]
"""From arguments and a gate: the state of a new run, and what to call to have it finished."""


def run_side_by_side(
    begin: Begin,
    inputs: Sequence[Any],
    backend: Backend,
    concurrency: int | None,
    num_threads: int | None,
    title: str | None,
) -> list[BatchResult]:
    """Run once for each input.

    Args:
        backend: what answers them.
        concurrency: most runs that may have calls under way.
        num_threads: most runs whose program's own code may be under way, waiting or not; by default as many as help to put
            the first calls in order.
        title: of the progress bar; None: there is none.

    Returns:
        The results in the order of the inputs.
    """
    if not inputs:
        return []
    concurrency = concurrency or DEFAULT_CONCURRENCY
    num_threads = min(len(inputs), num_threads or max(concurrency, NUM_LOOKED_AT))
    batch = _Batch(begin, BatchGate(backend, num_threads, concurrency))
    with batch, ThreadPoolExecutor(num_threads, "radixrt-program") as threads:
        futures: list[Future[BatchResult]] = []
        try:
            futures += (threads.submit(batch.run_one, arguments) for arguments in inputs)
            _show_progress(futures, title)
        except BaseException:  # Ctrl-C, most likely
            for future in futures:
                future.cancel()
            batch.cancel()
            raise
    return [future.result() for future in futures]


class _Batch:
    """The runs of a batch."""

    def __init__(self, begin: Begin, gate: BatchGate) -> None:
        self._begin = begin
        self._gate = gate
        self._lock = threading.Lock()
        self._under_way: set[Run] = set()
        self._cancelled = False

    def run_one(self, arguments: Any) -> BatchResult:
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
            self._gate.leave(run)
            with self._lock:
                self._under_way.discard(run)

    def __enter__(self) -> "_Batch":
        return self

    def __exit__(self, *exception: object) -> None:
        self._gate.end()

    def cancel(self) -> None:
        self._gate.close()
        with self._lock:
            self._cancelled = True
            for run in self._under_way:
                run.cancel()


def _show_progress(futures: "list[Future[BatchResult]]", title: str | None) -> None:
    """Wait for all."""
    with _progress_bar(title, len(futures)) as advance:
        for _ in concurrent.futures.as_completed(futures):
            advance(1)


@contextlib.contextmanager
def _progress_bar(title: str | None, total: int) -> Iterator[Callable[[int], None]]:
    """Where ``rich`` is installed and someone looks."""
    try:
        from rich import console, progress
    except ImportError:
        title = None
    if title is None:
        yield lambda _: None
        return
    screen = console.Console(stderr=True)
    with progress.Progress(
        progress.TextColumn(title), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(), transient=True, console=screen, disable=not screen.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
