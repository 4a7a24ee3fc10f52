"""How does a program run? ``@function`` makes a Python function one that runs, streams, and runs in batches."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from radixrt.lang.backends.default import backend_of, default_backend
from radixrt.lang.backends.protocol import Backend
from radixrt.lang.batch import Batch, BatchResult
from radixrt.lang.batch_gate import BatchGate
from radixrt.lang.errors import ProgramError
from radixrt.lang.run import CURRENT_RUN, Run
from radixrt.lang.sampling import Sampling, sampling_of
from radixrt.lang.state import State
from radixrt.lang.stream import Stream
from radixrt.lang.tracing.recorder import tell_recorders

Result = TypeVar("Result")


class Function:
    """A program. Called with a state, it goes on in that state, as a part of the program that calls it."""

    def __init__(
        self, body: Callable[..., Any], backend: Backend | str | None, sampling: Sampling
    ) -> None:
        self._body = body
        self._backend = backend
        self._sampling = sampling
        self.is_async = inspect.iscoroutinefunction(body)
        self.__name__: str = body.__name__
        functools.update_wrapper(self, body)

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """Go on in a state; returns what the function returns (of an ``async def``: what to await).

        Raises:
            ProgramError: the first argument is no state.
        """
        if not isinstance(state, State):
            raise ProgramError(
                f"{self.__name__} was called without a state. Start it with {self.__name__}.run(...), or call it with the "
                "state of the program that it is to be a part of."
            )
        return self._body(state, *args, **kwargs)

    # ------------------------------------------------------------ once

    def run(
        self,
        *args: Any,
        backend: Backend | str | None = None,
        sampling: Sampling | None = None,
        **kwargs: Any,
    ) -> State:
        """Run the program with these arguments and wait for all of it.

        Args:
            backend: what answers; by default the function's, that of the program this is called in, or the default.
            sampling: settings for every gen that does not set them itself.

        Returns:
            The state: ``state["name"]`` for variables, ``state.result`` for what the function returned.

        Raises:
            LangError: a call failed; the error names its line.
            Exception: whatever the program raises. What it has under way is cancelled then.
        """
        return self._finished(self._begin(backend, sampling), args, kwargs)

    async def arun(
        self,
        *args: Any,
        backend: Backend | str | None = None,
        sampling: Sampling | None = None,
        **kwargs: Any,
    ) -> State:
        """As :meth:`run`, in an event loop. A function that is not ``async def`` runs in a thread."""
        state = self._begin(backend, sampling)
        if self.is_async:
            return await self._finished_async(state, args, kwargs)
        work = asyncio.to_thread(self._finished, state, args, kwargs)
        return await _cancelling(state._run.cancel, work)

    # ------------------------------------------------------------ many times

    def run_batch(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        max_concurrency: int | None = None,
        num_threads: int | None = None,
        progress: bool = True,
        backend: Backend | str | None = None,
        sampling: Sampling | None = None,
    ) -> list[BatchResult]:
        """Run the program once for each input, side by side; those that begin alike one after another.

        Args:
            inputs: the arguments of each run.
            max_concurrency: most runs that may have calls under way, those of programs that they run included; 64 by default.
            num_threads: most runs whose own code may be under way, each in a thread; 1 for code that bears no other beside
                it. By default 512, so that many first calls are known when they are put in order.
            progress: show a progress bar, if ``rich`` is installed.
            backend, sampling: as of :meth:`run`.

        Returns:
            A state for each input, in their order; a :class:`radixrt.lang.FailedRun` where the run raised an error.

        Raises:
            ProgramError: the inputs are no list of arguments, or no run may have calls or code under way.
        """
        return self._batch(inputs, max_concurrency, num_threads, progress, backend, sampling).run()

    async def arun_batch(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        max_concurrency: int | None = None,
        num_threads: int | None = None,
        progress: bool = True,
        backend: Backend | str | None = None,
        sampling: Sampling | None = None,
    ) -> list[BatchResult]:
        """As :meth:`run_batch`, in an event loop; each program runs in a thread."""
        batch = self._batch(inputs, max_concurrency, num_threads, progress, backend, sampling)
        return await _cancelling(batch.cancel, asyncio.to_thread(batch.run))

    # ------------------------------------------------------------ while it runs

    def stream(
        self,
        *args: Any,
        backend: Backend | str | None = None,
        sampling: Sampling | None = None,
        **kwargs: Any,
    ) -> Stream:
        """Run the program in a thread and iterate over its text as it comes; leaving the stream cancels it."""
        state = self._begin(backend, sampling)
        return Stream(state, lambda: self._finished(state, args, kwargs))

    astream = stream
    """The same stream, for ``async for``."""

    # ------------------------------------------------------------ inside

    def _choose_backend(self, given: Backend | str | None) -> Backend:
        chosen = given if given is not None else self._backend
        if chosen is not None:
            return backend_of(chosen)
        enclosing = CURRENT_RUN.get()
        return default_backend() if enclosing is None else enclosing.backend

    def _batch(
        self,
        inputs: Iterable[Mapping[str, Any]],
        max_concurrency: int | None,
        num_threads: int | None,
        progress: bool,
        backend: Backend | str | None,
        sampling: Sampling | None,
    ) -> Batch:
        _check_positive("max_concurrency", max_concurrency)
        _check_positive("num_threads", num_threads)
        enclosing = CURRENT_RUN.get()
        chosen = self._choose_backend(backend)

        def begin(
            arguments: Mapping[str, Any], gate: BatchGate
        ) -> tuple[State, Callable[[], State]]:
            state = self._begin(chosen, sampling, gate, enclosing)
            return state, lambda: self._finished(state, (), arguments)

        title = self.__name__ if progress else None
        return Batch(begin, _as_list(inputs), chosen, max_concurrency, num_threads, title)

    def _begin(
        self,
        backend: Backend | str | None,
        sampling: Sampling | None,
        gate: BatchGate | None = None,
        outer: Run | None = None,
    ) -> State:
        """The state of a new run.

        Args:
            outer: the run that this one is begun in, if another thread than its own begins it.
        """
        settings = self._sampling if sampling is None else sampling.over(self._sampling)
        outer = outer if outer is not None else CURRENT_RUN.get()
        run = Run(self._choose_backend(backend), settings, gate, self.__name__, outer)
        tell_recorders(run.record)
        return State(run)

    def _finished(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> State:
        """Run the body in this thread and wait for all that it started."""
        if self.is_async:
            return _run_in_new_loop(self._finished_async(state, args, kwargs))
        with state._run.under_way():
            state.result = self._body(state, *args, **kwargs)
            state._run.finish()
        return state

    async def _finished_async(
        self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> State:
        with state._run.under_way():
            state.result = await self._body(state, *args, **kwargs)
            await state._run.finish_async()
        return state


@overload
def function(body: Callable[..., Any], /) -> Function: ...
@overload
def function(
    *, backend: Backend | str | None = None, **sampling: Any
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    body: Callable[..., Any] | None = None,
    /,
    *,
    backend: Backend | str | None = None,
    **sampling: Any,
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a program of a function whose first parameter is its state. ``async def`` is welcome.

    Args:
        backend: what answers its calls, unless a run says otherwise.
        sampling: any field of :class:`Sampling`, for all its gens that do not say otherwise.

    Raises:
        ProgramError: there is no such setting.
    """
    settings = sampling_of("function", sampling)
    if body is None:
        return lambda body: Function(body, backend, settings)
    return Function(body, backend, settings)


async def _cancelling(cancel: Callable[[], None], work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work that goes on in a thread; whoever gives up waiting cancels it."""
    try:
        return await work
    except asyncio.CancelledError:
        cancel()
        raise


def _run_in_new_loop(program: Any) -> State:
    """Raises:
    ProgramError: this thread has a running event loop already.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        state: State = asyncio.run(program)
        return state
    program.close()
    raise ProgramError("An event loop runs here already: write `await program.arun(...)`.")


def _as_list(inputs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    listed = [] if isinstance(inputs, Mapping | str) else list(inputs)
    if isinstance(inputs, Mapping | str) or not all(isinstance(one, Mapping) for one in listed):
        raise ProgramError(
            'run_batch takes a list of arguments, such as [{"question": "..."}, {"question": "..."}].'
        )
    return listed


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ProgramError(
            f"run_batch's {name} must be at least 1, not {value}; leave it out for the default."
        )
