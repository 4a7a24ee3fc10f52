"""Executes a batch: one run for each input, each in a thread, admitted in the order of common
prefixes."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from radixrt.lang.backends.protocol import Backend
from radixrt.lang.runtime.admission import BatchAdmission
from radixrt.lang.runtime.run import Run
from radixrt.lang.state import State

DEFAULT_CONCURRENCY = 64
MAX_THREADS = 512
"""Programs that run before their admission, so that many first calls can be put in order. Each
takes a thread."""


class FailedRun:
    """The result of a run that raised an error. Every access raises that error.

    Attributes:
        error: the error.
        state: the state so far, with the variables that were computed.
    """

    def __init__(self, error: BaseException, state: State) -> None:
        self.error = error
        self.state = state

    def __repr__(self) -> str:
        return f"FailedRun({self.error!r})"

    def __getitem__(self, name: str) -> NoReturn:
        raise self.error

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error for every attribute of a state."""
        if hasattr(State, name) or name == "result":
            raise self.error
        raise AttributeError(f"A failed run, as a state, has no {name!r}.")


BatchResult = State | FailedRun
Begin = Callable[[Any, BatchAdmission], tuple[State, Callable[[], State]]]
"""Makes, from arguments and admission, the state of a new run and the function that finishes the
run."""


class Batch:
    """The runs of one ``run_batch``."""

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
            backend: the backend of all runs.
            concurrency: most runs with calls under way.
            num_threads: most programs that run at a time, admitted or not.
            title: of the progress bar; None: no bar.
        """
        concurrency = concurrency or DEFAULT_CONCURRENCY
        self._begin = begin
        self._inputs = inputs
        self._title = title
        self._num_threads = min(len(inputs), num_threads or max(concurrency, MAX_THREADS))
        self._admission = BatchAdmission(backend, self._num_threads, concurrency)
        self._lock = threading.Lock()
        self._futures: list[Future[BatchResult]] = []
        self._under_way: set[Run] = set()
        self._cancelled = False

    def run(self) -> list[BatchResult]:
        """The results in the order of the inputs."""
        if not self._inputs:
            return []
        with ThreadPoolExecutor(self._num_threads, "radixrt-program") as threads:
            try:
                for arguments in self._inputs:
                    self._futures.append(threads.submit(self._run_one, arguments))
                _show_progress(self._futures, self._title)
            except BaseException:  # Ctrl-C, most likely
                self.cancel()
                raise
        return [future.result() for future in self._futures]

    def cancel(self) -> None:
        """Cancel all runs, also those that have not begun. From any thread."""
        self._admission.close()
        with self._lock:
            self._cancelled = True
            for future in self._futures:
                future.cancel()
            for run in self._under_way:
                run.cancel()

    def _run_one(self, arguments: Any) -> BatchResult:
        state, finish = self._begin(arguments, self._admission)
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
            self._admission.leave(run.id)
            with self._lock:
                self._under_way.discard(run)


def _show_progress(futures: list[Future[BatchResult]], title: str | None) -> None:
    """Wait for all runs, with a progress bar if ``rich`` is installed and stderr is a terminal."""
    try:
        from rich import console, progress
    except ImportError:
        title = None
    done: Iterable[Future[BatchResult]] = concurrent.futures.as_completed(futures)
    if title is not None:
        screen = console.Console(stderr=True)
        done = progress.track(
            done, title, len(futures), console=screen, transient=True, disable=not screen.is_terminal
        )  # fmt: skip
    for _ in done:
        pass
