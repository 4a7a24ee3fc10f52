"""The supervisor's look at the heartbeats of an engine."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.heartbeat import Heartbeat
from radixrt.supervisor.supervisor import START_PATIENCE, Supervisor, _Child

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[_Child]]:
    """Two processes that say nothing."""
    made = [
        _Child(name, subprocess.Popen(SLEEP), Heartbeat(tmp_path / name)) for name in ("a", "b")
    ]
    yield made
    for child in made:
        child.process.kill()
        child.process.wait()


def supervisor(engine: list[_Child], age_s: float, step_timeout: float = 4.0) -> Supervisor:
    made = object.__new__(Supervisor)
    made._config = ServerConfig(step_timeout=step_timeout)
    made._engine, made._started_at, made._start_limit_s = engine, time.monotonic() - age_s, None
    return made


def test_a_further_engine_may_take_some_times_as_long_to_start_as_the_first(
    children: list[_Child],
) -> None:
    one = supervisor(children, age_s=3600.0)
    one._look_at_heartbeats()
    assert not any(child.hung for child in children)  # the first may load a large model
    one._started_at = time.monotonic() - 2.0
    for child in children:
        child.heartbeat.promise(60.0)
    one._look_at_heartbeats()
    assert one._start_limit_s == pytest.approx(2.0 * START_PATIENCE, rel=0.2)


def test_a_process_that_hangs_at_its_start_is_killed(children: list[_Child]) -> None:
    one = supervisor(children, age_s=19.0)
    one._start_limit_s = 20.0
    children[1].heartbeat.promise(60.0)
    one._look_at_heartbeats()
    assert not children[0].hung
    one._started_at -= 2.0
    one._look_at_heartbeats()
    assert children[0].hung and children[0].process.wait(10) < 0
    assert not children[1].hung


def test_nothing_is_killed_without_a_step_timeout(children: list[_Child]) -> None:
    one = supervisor(children, age_s=100.0, step_timeout=0.0)
    one._start_limit_s = 20.0
    one._look_at_heartbeats()
    assert not any(child.hung for child in children)
