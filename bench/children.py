"""Starts child processes that end when this process ends, however it ends.

A child gets a session of its own, so that it can be ended with all processes that it has started.
Its group is reported to a watchdog: a small process that waits on a pipe and ends the groups that
are left when the pipe closes. The pipe closes also when this process is killed. SIGINT has its
default action in a child, also where this process ignores it, as programs do that ``nohup`` or
``&`` in a script has started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

END_TIMEOUT_S = 30.0
"""Time from SIGTERM to SIGKILL."""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program, which the caller ends by :func:`end`. ``options`` are those of ``Popen``."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        options["preexec_fn"] = _restore_sigint
    process = subprocess.Popen(command, start_new_session=True, **options)
    _WATCHDOG.report(f"+{process.pid}")
    return process


def end(process: subprocess.Popen[Any], timeout_s: float = END_TIMEOUT_S) -> int:
    """End a program of :func:`start` and all processes that it has started: SIGTERM, after
    ``timeout_s`` SIGKILL.

    Returns:
        The exit status of the program.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    _WATCHDOG.report(f"-{process.pid}")
    return status


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program until the block ends."""
    process = start(command, **options)
    try:
        yield process
    finally:
        end(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def run(
    command: Sequence[str],
    *,
    input: Any = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as ``subprocess.run`` does.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was ended.
        subprocess.CalledProcessError: with ``check``, its exit status was not 0.
    """
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(command, **options) as process:
        output, errors = process.communicate(input, timeout)
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _restore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Watchdog:
    """The pipe to the watchdog of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._pipe: IO[bytes] | None = None

    def report(self, line: str) -> None:
        """``+`` and a process group that begins, ``-`` and one that has ended."""
        with self._lock:
            if self._pid != os.getpid():  # the first report, also of a forked process
                self._begin()
            assert self._pipe is not None
            self._pipe.write(f"{line}\n".encode())

    def _begin(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # out of reach of a Ctrl-C in the terminal
        )
        self._pid, self._pipe = os.getpid(), process.stdin
        self._process = process


_WATCHDOG = _Watchdog()


def _watch(reports: IO[str]) -> None:
    """Keep account of the groups until the pipe closes, then end those that are left."""
    groups: set[int] = set()
    for report in reports:
        (groups.add if report[0] == "+" else groups.discard)(int(report[1:]))
    deadline = time.monotonic() + END_TIMEOUT_S
    _signal(groups, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        _signal(groups, 0)
    _signal(groups, signal.SIGKILL)


def _signal(groups: set[int], signum: int) -> None:
    """Send a signal to all groups, and remove from the set those without a process."""
    for group in list(groups):
        try:
            os.killpg(group, signum)
        except (ProcessLookupError, PermissionError):
            groups.discard(group)


if __name__ == "__main__":
    _watch(sys.stdin)
