"""``@function`` turns a Python function into a program that runs once, in batches, or as a
stream."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from radixrt.lang.backends.protocol import Backend, Sampling, sampling_of
from radixrt.lang.backends.server import backend_of, default_backend
from radixrt.lang.batch import Batch, BatchResult
from radixrt.lang.errors import ProgramError
from radixrt.lang.runtime.admission import BatchAdmission
from radixrt.lang.runtime.run import CURRENT_RUN, Run
from radixrt.lang.state import State
from radixrt.lang.stream import Stream
from radixrt.lang.tracing.recorder import tell_recorders

Result = TypeVar("Result")


class Function:
    """A program. Called with a state, it continues that state, as a part of the calling program."""

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
        """Continue a state.

        Returns:
            The result of the function; of an ``async def``, its coroutine.

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
        """Run the program and wait until everything is computed.

        Args:
            args, kwargs: the arguments of the function after its state.
            backend: a backend, or a server's address. Default: the function's backend, then the
                backend of the program that runs this one, then the default backend.
            sampling: settings for every gen that does not set them itself.

        Returns:
            The state: ``state["name"]`` for variables, ``state.result`` for the result of the
            function.

        Raises:
            LangError: a call failed; the error names its line.
            Exception: the program's own error. Its calls are cancelled then.

        >>> import radixrt.lang as rl
        >>> from tests.lang.scripted_backend import ScriptedBackend
        >>> @rl.function
        ... def ask(s, question):
        ...     s += question + rl.gen("answer")
        >>> ask.run("Why?", backend=ScriptedBackend(lambda prompt: " Because."))["answer"]
        ' Because.'
        """
        return self._finished(self._begin(backend, sampling), args, kwargs)

    async def arun(
        self,
        *args: Any,
        backend: Backend | str | None = None,
        sampling: Sampling | None = None,
        **kwargs: Any,
    ) -> State:
        """:meth:`run` in an event loop. A function that is not ``async def`` runs in a thread."""
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
        """Run the program once for each input, concurrently. Runs with a long common prefix are
        sent one after another.

        Args:
            inputs: the keyword arguments of each run.
            max_concurrency: most runs with calls under way, those of programs that they run
                included. Default: 64.
            num_threads: most programs that execute at a time, each in a thread; 1 for code that is
                not thread-safe. Default: 512, so that many first calls can be put in order.
            progress: show a progress bar, if ``rich`` is installed.
            backend, sampling: see :meth:`run`.

        Returns:
            A state for each input, in order; a :class:`radixrt.lang.FailedRun` where the run raised
            an error.

        Raises:
            ProgramError: the inputs are no list of arguments, or a limit is below 1.

        >>> import radixrt.lang as rl
        >>> from tests.lang.scripted_backend import ScriptedBackend
        >>> @rl.function
        ... def shout(s, word):
        ...     s += word + rl.gen("answer")
        >>> states = shout.run_batch([{"word": "a"}, {"word": "b"}], backend=ScriptedBackend(str.upper), progress=False)
        >>> [state["answer"] for state in states]
        ['A', 'B']
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
        """:meth:`run_batch` in an event loop; each program runs in a thread."""
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
        """Run the program in a thread; iterate over its text as it is generated. Leaving the stream
        cancels the program.

        >>> import radixrt.lang as rl
        >>> from tests.lang.scripted_backend import ScriptedBackend
        >>> @rl.function
        ... def ask(s):
        ...     s += "Why?" + rl.gen("answer")
        >>> "".join(ask.stream(backend=ScriptedBackend(lambda prompt: " Because.")))
        'Why? Because.'
        """
        state = self._begin(backend, sampling)
        return Stream(state, lambda: self._finished(state, args, kwargs))

    astream = stream
    """The same, for ``async for``."""

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
        for name, limit in (("max_concurrency", max_concurrency), ("num_threads", num_threads)):
            if limit is not None and limit < 1:
                raise ProgramError(
                    f"run_batch's {name} must be at least 1, not {limit}; leave it out for the default."
                )
        enclosing = CURRENT_RUN.get()
        chosen = self._choose_backend(backend)

        def begin(
            arguments: Mapping[str, Any], admission: BatchAdmission
        ) -> tuple[State, Callable[[], State]]:
            state = self._begin(chosen, sampling, admission, enclosing)
            return state, lambda: self._finished(state, (), arguments)

        title = self.__name__ if progress else None
        return Batch(begin, _as_list(inputs), chosen, max_concurrency, num_threads, title)

    def _begin(
        self,
        backend: Backend | str | None,
        sampling: Sampling | None,
        admission: BatchAdmission | None = None,
        outer: Run | None = None,
    ) -> State:
        """The state of a new run.

        Args:
            outer: the run around this one, if it is not the current run of this thread.
        """
        settings = self._sampling if sampling is None else sampling.over(self._sampling)
        outer = outer if outer is not None else CURRENT_RUN.get()
        run = Run(self._choose_backend(backend), settings, admission, self.__name__, outer)
        tell_recorders(run.record)
        return State(run)

    def _finished(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> State:
        """Run the body in this thread and wait for all its calls."""
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
    """Turn a function into a program. Its first parameter is the state. The function may be ``async
    def``.

    Args:
        backend: a backend, or a server's address, for runs that name none.
        sampling: fields of :class:`Sampling`, for gens and runs that do not set them.

    Raises:
        ProgramError: a setting is unknown.

    >>> import radixrt.lang as rl
    >>> @rl.function(temperature=0)
    ... def ask(s, question):
    ...     s += rl.user(question)
    ...     s += rl.assistant(rl.gen("answer", max_tokens=40))
    >>> ask.__name__
    'ask'
    """
    settings = sampling_of("function", sampling)
    if body is None:
        return lambda body: Function(body, backend, settings)
    return Function(body, backend, settings)


async def _cancelling(cancel: Callable[[], None], work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work in a thread. Cancelling the wait cancels the work."""
    try:
        return await work
    except asyncio.CancelledError:
        cancel()
        raise


def _run_in_new_loop(program: Any) -> State:
    """Raises ProgramError if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        state: State = asyncio.run(program)
        return state
    program.close()
    raise ProgramError("An event loop runs here already: write `await program.arun(...)`.")


def _as_list(inputs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    listed: list[Any] = [inputs] if isinstance(inputs, str) else list(inputs)
    if isinstance(inputs, Mapping) or not all(isinstance(one, Mapping) for one in listed):
        raise ProgramError(
            'run_batch takes a list of arguments, such as [{"question": "..."}, {"question": "..."}].'
        )
    return listed
