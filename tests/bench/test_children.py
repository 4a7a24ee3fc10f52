"""Programs that a benchmark or a test starts end with it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench import children

ROOT = Path(__file__).parents[2]
SERVER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True); time.sleep(600)"
"""A server with a helper of its own, which outlives it if nobody ends it."""
BENCHMARK = f"""
import subprocess, sys, threading
from bench import children
def begin():  # in a thread that has ended when the benchmark is killed
    global server
    server = children.start([sys.executable, "-c", {SERVER!r}], stdout=subprocess.PIPE)
thread = threading.Thread(target=begin)
thread.start()
thread.join()
server.stdout.readline()
print(server.pid, flush=True)
{{}}
"""


def begin_benchmark(then: str, **options: object) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A process that starts the server, and the server with its helper."""
    benchmark = children.start(
        [sys.executable, "-c", BENCHMARK.format(then)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip
    assert benchmark.stdout is not None
    server = psutil.Process(int(benchmark.stdout.readline()))
    return benchmark, [server, *server.children()]


def ended(processes: list[psutil.Process], timeout_s: float = 20) -> bool:
    """Whether they end in time; one that nobody has waited for counts as ended."""
    deadline = time.monotonic() + timeout_s
    while any(_runs(each) for each in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(_runs(each) for each in processes)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_benchmark_that_is_terminated_leaves_no_server(signum: int) -> None:
    benchmark, family = begin_benchmark("import time; time.sleep(600)")
    try:
        assert len(family) == 2 and not ended(family, timeout_s=0)
        benchmark.send_signal(signum)
        assert benchmark.wait(20) != 0
        assert ended(family)
    finally:
        children.end(benchmark)


def test_a_benchmark_that_fails_leaves_no_server() -> None:
    benchmark, family = begin_benchmark("raise SystemExit(3)")
    assert benchmark.wait(20) == 3
    assert ended(family)
    children.end(benchmark)


def test_the_block_ends_the_server_and_its_helper() -> None:
    with children.running([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(family) == 2
    assert ended(family, timeout_s=5)


def test_a_server_that_ignores_sigterm_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    server = children.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline()
    assert children.end(server, timeout_s=0.1) == -signal.SIGKILL


def test_sigint_has_its_default_in_a_child_of_a_process_that_ignores_it() -> None:
    code = (
        "import signal, sys; from bench import children; "
        "signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "report = 'import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)'; "
        "print(children.run([sys.executable, '-c', report], capture_output=True, text=True).stdout)"
    )
    done = children.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_run_gives_what_subprocess_gives_and_ends_what_takes_too_long() -> None:
    echo = [sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(4)"]
    done = children.run(echo, input="text", capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("text\n", 4)
    with pytest.raises(subprocess.CalledProcessError):
        children.run(echo, input="text", check=True, capture_output=True, text=True)
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        children.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.2)
    assert time.monotonic() - begin < 20
    for child in psutil.Process(os.getpid()).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            assert not any("time.sleep(600)" in argument for argument in child.cmdline())
