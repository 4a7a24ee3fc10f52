"""Processes that hang in different ways, while they stream answers: those that do not work are
replaced soon, those that work are not.

The tests of the one server run in order, and the last one ends it.
"""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.conftest import Server
from tests.server.test_life import assert_all_gone
from tests.server.test_takeover import (
    PROMPT,
    Stream,
    is_alive,
    post,
    process_of,
    request,
    until,
    wait_until_ready,
)

DEADLOCK, WORK = signal.SIGUSR1, signal.SIGUSR2
WORK_S = 7.0
"""Longer than a process may wait for itself (radixrt.supervisor.watch.STUCK_S)."""
FAULTS = f"""
import signal, threading, time

def work(signum, frame):
    until = time.monotonic() + {WORK_S}
    while time.monotonic() < until:
        sum(range(1000))

signal.signal({DEADLOCK.value}, lambda signum, frame: threading.Event().wait())
signal.signal({WORK.value}, work)
"""
"""The main thread of each process that imports it waits for ever, or computes for long, at a
signal."""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(FAULTS)
    paths = f"{folder}:{Path(__file__).parents[2]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        return start_server()


def seconds_until_dead(server: Server, victim: str, signum: int) -> float:
    process = process_of(server, victim)
    begin = time.monotonic()
    process.send_signal(signum)
    until(lambda: not is_alive(process), 40)
    return time.monotonic() - begin


VICTIMS = ["worker", "tokenizer"] + ["scheduler"] * ("RADIXRT_TORTURE" in os.environ)
"""A scheduler is watched as a worker is; `make torture` tries it, too."""


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_whose_main_loop_waits_for_itself_is_replaced_soon(
    server: Server, victim: str
) -> None:
    """Its other threads go on, so that it beats."""
    body = request(temperature=0)
    undisturbed = Stream(server, body).run().texts
    wait_until_ready(server)
    with ThreadPoolExecutor(1) as threads:
        stream = Stream(server, body)
        running = threads.submit(stream.run)
        stream.wait_for_events()
        seconds = seconds_until_dead(server, victim, DEADLOCK)
        assert running.result().texts == undisturbed
    print(f"A {victim} process that waits for itself is gone after {seconds:.1f} s.")
    assert 4.0 < seconds < 15.0
    until(lambda: f"{victim} process waited for itself" in "".join(server.log))
    wait_until_ready(server)


@pytest.mark.parametrize("victim", [name for name in VICTIMS if name != "tokenizer"])
def test_a_step_that_computes_for_long_is_no_hang(server: Server, victim: str) -> None:
    """However long the steps before it took."""
    process = process_of(server, victim)
    process.send_signal(WORK)
    begin = time.monotonic()
    assert post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
    assert time.monotonic() - begin > WORK_S / 2
    assert is_alive(process)


def test_an_api_process_that_was_stopped_ends_the_server_soon(server: Server) -> None:
    family = server.family()
    seconds = seconds_until_dead(server, "api", signal.SIGSTOP)
    print(f"An api process that was stopped is gone after {seconds:.1f} s.")
    assert seconds < 6.0
    assert server.process.wait(30) == 1
    assert_all_gone(family)
    until(lambda: "The api process gave no sign of life" in "".join(server.log))
