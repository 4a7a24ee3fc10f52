"""Tasks and threads that a process depends on are supervised: if one ends, the process ends and
says why."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from radixrt.base.liveness.heartbeat import Activity
from radixrt.base.liveness.supervision import run_loop, start_thread, supervise

PACKAGE = Path(__file__).parent.parent / "radixrt"

STARTERS = {"create_task", "ensure_future", "Thread", "Timer", "submit"}
"""Names of calls that start a task, a thread or work in a pool of threads."""

OF_OTHERS = {"group", "self", "BACKGROUND"}
"""A TaskGroup ends by the first error; the others are no starters: a method that returns the future
to its caller."""

SHORT_LIVED = {
    ("api/conversations/open_prompts.py", "_compute_ahead"): (1, "advice; logs its errors"),
    ("api/conversations/open_prompts.py", "_end"): (1, "gives one prompt's KV back"),
    ("api/http/connection.py", "_accept"): (1, "opens one connection"),
    ("api/http/events.py", "while_receiving"): (2, "awaited here"),
    ("api/http/events.py", "_send_all"): (1, "fills the pauses of one answer"),
    ("api/models/models.py", "load"): (2, "awaited here"),
    ("api/models/models.py", "_load"): (1, "its requests wait for it"),
    ("client/leases.py", "pin"): (1, "awaited here"),
    ("client/leases.py", "restore"): (1, "guards each lease"),
    ("constrained/compiler/helper.py", "start"): (1, "awaited here"),
    ("constrained/compiler/pool.py", "_run"): (1, "awaited here"),
    ("constrained/compiler/pool.py", "compile"): (1, "awaited here"),
    ("lang/backends/engine.py", "handle_async_request"): (1, "hands its end to the reader"),
    ("lang/batch.py", "run"): (1, "awaited here"),
    ("lang/runtime/admission.py", "_waiting_run"): (1, "opens the door once"),
    ("lang/stream.py", "__init__"): (1, "runs the user's program, and hands its error on"),
    ("worker/adapters.py", "load"): (1, "reads one adapter, and reports an error"),
    ("worker/fingerprint.py", "begin_weights_digest"): (1, "awaited before the engine is ready"),
    ("tokenizer/calls.py", "take"): (1, "replies to one call, also with an error"),
    ("tokenizer/in_flight.py", "_next_checked_chunk"): (
        1,
        "checks one value, and fails its request",
    ),
    ("tokenizer/process.py", "_both"): (2, "awaited here"),
    ("tokenizer/process.py", "_handle_request"): (1, "begins one request, and fails it"),
    ("tokenizer/process.py", "run"): (3, "awaited here"),
    ("tokenizer/schedulers.py", "_serve_link"): (2, "awaited here"),
}
"""Functions that start what need not be supervised: how many of it, and why not."""


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def num_unsupervised(function: ast.AST) -> int:
    """Calls in it that start something of its own, less those that supervise."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            count += name in STARTERS and owner not in OF_OTHERS
            count -= name == "supervise"
    return count


def test_whatever_lives_as_long_as_its_process_is_supervised() -> None:
    """A function supervises what it starts, or stands in the list above."""
    found = {
        (str(file.relative_to(PACKAGE)), function.name): count
        for file in PACKAGE.rglob("*.py")
        if file.name != "supervision.py"
        if any(f"{name}(" in (text := file.read_text()) for name in STARTERS)
        for function in functions(ast.parse(text))
        if (count := num_unsupervised(function)) > 0
    }
    assert found == {function: count for function, (count, _) in SHORT_LIVED.items()}


def end_of(code: str) -> tuple[int, str]:
    """The exit status and the log of a program."""
    imports = (
        "import asyncio, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from radixrt.base.liveness.supervision import start_thread, supervise\n"
        "async def fail(): raise ValueError('of it')\n"
        "def fail_now(): raise ValueError('of it')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", imports + code], capture_output=True, text=True, timeout=30
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("start_thread(fail_now, name='x'); time.sleep(20)", "The thread x failed (ValueError"),
        (
            "supervise(ThreadPoolExecutor().submit(fail_now), 'It', may_return=True); time.sleep(20)",
            "It failed (ValueError: of it)",
        ),
        (
            "async def main():\n supervise(asyncio.create_task(fail()), 'It')\n await asyncio.sleep(20)\n"
            "asyncio.run(main())",
            "It failed (ValueError: of it)",
        ),
        (
            "async def main():\n supervise(asyncio.create_task(asyncio.sleep(0)), 'It')\n"
            " await asyncio.sleep(20)\nasyncio.run(main())",
            "It has ended",
        ),
    ],
)
def test_the_end_of_a_part_is_the_end_of_the_process(code: str, reason: str) -> None:
    status, logged = end_of(code)
    assert status == 1 and reason in logged


def test_a_task_that_was_cancelled_or_may_return_is_no_failure() -> None:
    failures: list[str] = []

    async def main() -> None:
        cancelled, stale = asyncio.create_task(asyncio.sleep(20)), asyncio.Future[None]()

        async def wait() -> None:
            await stale

        waiting, returning = asyncio.create_task(wait()), asyncio.create_task(asyncio.sleep(0))
        supervise(cancelled, "one", failures.append)
        supervise(waiting, "another", failures.append)
        supervise(returning, "a third", failures.append, may_return=True)
        await asyncio.sleep(0)
        cancelled.cancel()
        stale.cancel()
        await asyncio.wait([cancelled, waiting, returning])
        await asyncio.sleep(0)

    asyncio.run(main())
    assert failures == ["another has ended."]  # nobody has cancelled it


def test_a_thread_may_end_something_else_than_the_process() -> None:
    failed = threading.Event()
    start_thread(int, "no number", name="x", on_failure=lambda reason: failed.set())
    assert failed.wait(5)


def test_a_loop_in_the_background_survives_a_task_that_ends_programs() -> None:
    loop = asyncio.new_event_loop()
    thread = start_thread(run_loop, loop, name="loop")

    async def leave() -> None:
        sys.exit(3)

    left = asyncio.run_coroutine_threadsafe(leave(), loop)
    with pytest.raises(SystemExit):
        left.result(5)
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 7), loop).result(5) == 7
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_at_work_is_told_from_one_that_was_stopped() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
        try:
            activity = Activity(process.pid)
            looks = [activity.is_seen() for _ in range(3) if time.sleep(0.05) is None]
            assert all(looks)
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            activity.is_seen()  # it has worked since the last look
            assert not activity.is_seen()
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            assert activity.is_seen()
        finally:
            process.kill()
    assert activity.is_seen()  # it is gone: its end is noticed otherwise


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("work", "is_stuck"),
    [
        ("threading.Event().wait()", True),
        ("while True: time.sleep(0.01)", False),
        ("threading.Thread(target=spin).start(); threading.Event().wait()", False),
        ("subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])", False),
    ],
)
def test_a_process_that_waits_for_itself_is_told_from_one_that_waits_for_others(
    work: str, is_stuck: bool
) -> None:
    """For a lock that another process has, a thread, or a compiler; a thread that beats does not
    count. One look that finds it at work is enough: a thread that waits for the interpreter's lock
    sleeps."""
    program = f"""
import hashlib, subprocess, sys, threading, time
def spin():
    while True: pass
def beat():
    print(threading.get_native_id(), flush=True)
    data = bytes(1 << 20)
    while True: hashlib.sha256(data)
threading.Thread(target=beat).start()
{work}
"""
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        try:
            assert process.stdout is not None
            beating = int(process.stdout.readline())
            activity = Activity(process.pid)
            time.sleep(1.0)
            activity.is_stuck(beating)
            looks = [activity.is_stuck(beating) for _ in range(4) if time.sleep(0.2) is None]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert all(looks) is is_stuck
