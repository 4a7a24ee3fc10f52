"""Supervises tasks and threads on which a whole process depends: when one ends by an error, the
process ends and logs the reason.

Otherwise nobody sees such an error: a process whose receiving task has ended is alive and deaf. One
that ends is started again, and its requests go on.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

log = logging.getLogger(__name__)

EXIT_FAILED = 1
"""Exit status of a process that ends because a part of it has."""

OnFailure = Callable[[str], None]
"""Takes the reason."""


def end_process(reason: str) -> None:
    """End this process at once, from any thread: a regular exit would end only the thread."""
    log.critical("%s The process ends.", reason)
    logging.shutdown()
    os._exit(EXIT_FAILED)


def supervise(
    work: "asyncio.Task[Any] | concurrent.futures.Future[Any]",
    what: str,
    on_failure: OnFailure = end_process,
    *,
    may_return: bool = False,
) -> None:
    """Let the end of a task, or of work in a pool of threads, be the end of the process, unless
    somebody cancels the task.

    Args:
        what: the work, as the subject of a sentence.
        on_failure: ends something else in place of the process.
        may_return: only an error is a failure.
    """

    def ended(done: "asyncio.Future[Any] | concurrent.futures.Future[Any]") -> None:
        if done.cancelled():
            # One that nobody has cancelled waited for something that was.
            if not hasattr(done, "cancelling") or done.cancelling():
                return
            _fail(what, None, on_failure)
        elif (error := done.exception()) is not None or not may_return:
            _fail(what, error, on_failure)

    work.add_done_callback(ended)


def start_thread(
    target: Callable[..., object],
    *arguments: object,
    name: str,
    on_failure: OnFailure = end_process,
) -> threading.Thread:
    """Start a daemon thread. An error in it is the end of the process.

    Args:
        on_failure: ends something else in place of the process.
    """

    def run() -> None:
        try:
            target(*arguments)
        except BaseException as error:
            _fail(f"The thread {name}", error, on_failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def run_loop(loop: "asyncio.AbstractEventLoop") -> None:
    """Run an event loop until it is stopped. A SystemExit in one of its tasks ends only that
    task."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            log.exception("A task in the background has raised what ends programs.")


def _fail(what: str, error: BaseException | None, on_failure: OnFailure) -> None:
    how = "has ended" if error is None else f"failed ({type(error).__name__}: {error})"
    log.error("%s %s.", what, how, exc_info=error)
    on_failure(f"{what} {how}.")
