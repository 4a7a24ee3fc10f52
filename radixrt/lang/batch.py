"""How do many runs go side by side? Each in a thread, its first call held back until its turn comes."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from radixrt.lang.backends.protocol import Backend, Prompt, Usage
from radixrt.lang.background import BACKGROUND
from radixrt.lang.batch_order import PrefixOrder
from radixrt.lang.room import Room
from radixrt.lang.run import Gate, Run
from radixrt.lang.state import State

DEFAULT_CONCURRENCY = 64
NUM_LOOKED_AT = 512
"""Runs that are begun ahead of their turn, so that there is something to put in order. Each holds a thread."""
SETTLING_S = 0.02
"""How long the batch waits, once, for first calls to put in order, before it lets the first ones go."""


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

    def text(self) -> NoReturn:
        raise self.error

    def messages(self) -> NoReturn:
        raise self.error

    @property
    def result(self) -> NoReturn:
        raise self.error


BatchResult = State | FailedRun
Begin = Callable[[Any, Gate], tuple[State, Callable[[], State]]]
"""From arguments and a gate: the state of a new run, and what to call to have it finished."""


class BatchGate:
    """Lets runs send their first calls: in the order of what they share, and as many at a time as may and as fit.

    Lives in the runtime's event loop, but for :meth:`leave` and :meth:`close`.
    """

    def __init__(self, concurrency: int) -> None:
        self._most_inside = concurrency
        self._order = PrefixOrder()
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._inside: set[str] = set()
        self._room: Room | None = None
        self._opening: asyncio.Task[None] | None = None

    async def admit(self, run: Run, prompt: Prompt) -> None:
        text = _as_text(prompt)
        if run.id in self._inside:
            if self._room is not None:
                self._room.sends(run.id, text)
            return
        turn = self._turns.get(run.id)
        if turn is None:
            turn = self._turns[run.id] = asyncio.get_running_loop().create_future()
            self._order.add(text, run.id)
            self._open_soon(run.backend)
        await asyncio.shield(turn)

    def leave(self, run: Run) -> None:
        """A run has ended: its place is free. From any thread."""
        usages = [call.usage for call in run.record.calls]
        BACKGROUND.get().call_soon_threadsafe(self._leave, run.id, usages)

    def close(self) -> None:
        """Let nobody in any more. From any thread."""
        BACKGROUND.get().call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._most_inside = 0

    def _open_soon(self, backend: Backend) -> None:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(backend))
        self._let_in()

    async def _open(self, backend: Backend) -> None:
        settling = asyncio.sleep(SETTLING_S)
        cache_tokens, _ = await asyncio.gather(backend.cache_tokens(), settling)
        self._room = Room(cache_tokens)
        self._let_in()

    def _let_in(self) -> None:
        if self._room is None:
            return
        while len(self._order) and len(self._inside) < self._most_inside:
            prompt = self._order.next_prompt()
            if not self._room.fits(prompt):
                return
            run_id = str(self._order.next_key())
            self._inside.add(run_id)
            self._room.enter(run_id, prompt)
            self._turns.pop(run_id).set_result(None)

    def _leave(self, run_id: str, usages: Sequence[Usage]) -> None:
        self._inside.discard(run_id)
        if (turn := self._turns.pop(run_id, None)) is not None:
            self._order.remove(run_id)
            turn.cancel()
        if self._room is not None:
            self._room.leave(run_id, usages)
            self._let_in()


def run_side_by_side(
    begin: Begin, inputs: Sequence[Any], concurrency: int | None, title: str | None
) -> list[BatchResult]:
    """Run once for each input.

    Args:
        concurrency: most runs that may have calls under way.
        title: of the progress bar; None: there is none.

    Returns:
        The results in the order of the inputs.
    """
    if not inputs:
        return []
    batch = _Batch(begin, concurrency or DEFAULT_CONCURRENCY)
    num_threads = min(len(inputs), max(batch.concurrency, NUM_LOOKED_AT))
    with ThreadPoolExecutor(num_threads, "radixrt-program") as threads:
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

    def __init__(self, begin: Begin, concurrency: int) -> None:
        self.concurrency = concurrency
        self._begin = begin
        self._gate = BatchGate(concurrency)
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


def _as_text(prompt: Prompt) -> str:
    """Such that prompts which begin alike have texts that do."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"\0{message['role']}\0{message['content']}" for message in prompt)
