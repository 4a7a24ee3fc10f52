"""The supervisor's look at the heartbeats of an engine."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import EngineDiedError
from radixrt.base.heartbeat import Heartbeat
from radixrt.supervisor import launch
from radixrt.supervisor.supervisor import (
    START_PATIENCE,
    Supervisor,
    _Child,
    _Deaths,
    _environment,
    _Replica,
)

NOW = time.monotonic()
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Child]]:
    """Two processes that say nothing. Their supervisor's clock stands still."""
    clock = SimpleNamespace(monotonic=lambda: NOW, sleep=time.sleep)
    monkeypatch.setattr("radixrt.supervisor.supervisor.time", clock)
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
    made._engine, made._replicas, made._start_limit_s = engine, [], None
    set_age(engine, age_s)
    return made


def set_age(engine: list[_Child], age_s: float) -> None:
    for child in engine:
        child.started_at = NOW - age_s


def test_a_further_engine_may_take_some_times_as_long_to_start_as_the_first(
    children: list[_Child],
) -> None:
    one = supervisor(children, age_s=3600.0)
    one._look_at_heartbeats()
    assert not any(child.hung for child in children)  # the first may load a large model
    set_age(children, 2.0)
    for child in children:
        child.heartbeat.promise(60.0)
    one._look_at_heartbeats()
    assert one._start_limit_s == pytest.approx(2.0 * START_PATIENCE)


def test_a_process_that_hangs_at_its_start_is_killed(children: list[_Child]) -> None:
    one = supervisor(children, age_s=19.0)
    one._start_limit_s = 20.0
    children[1].heartbeat.promise(60.0)
    one._look_at_heartbeats()
    assert not children[0].hung
    set_age(children, 21.0)
    one._look_at_heartbeats()
    assert children[0].hung and children[0].process.wait(10) < 0
    assert not children[1].hung


@pytest.mark.parametrize(
    ("tokens", "age_s", "is_the_end"), [(0, 5.0, True), (1, 5.0, False), (0, 601.0, False)]
)
def test_only_deaths_without_a_token_or_ten_minutes_of_life_between_them_are_counted(
    children: list[_Child], tokens: int, age_s: float, is_the_end: bool
) -> None:
    one = supervisor(children, age_s)
    one._max_deaths, one._deaths = 3, _Deaths(2)
    one.channels = SimpleNamespace(next_engine=lambda: None)  # type: ignore[assignment]
    one._start_engine = lambda: None  # type: ignore[method-assign]
    children[0].name = "scheduler"
    children[0].heartbeat.promise(1.0, done=tokens)
    children[1].process.kill()
    children[1].process.wait()
    if is_the_end:
        with pytest.raises(EngineDiedError, match="The b process was killed by SIGKILL"):
            one._replace_engine(children[1])
    else:
        one._replace_engine(children[1])
        assert one._deaths.count == 1


@pytest.mark.parametrize("join", ["tcp://127.0.0.1:1", None])
def test_an_engine_ends_when_the_ingress_has_drained_all_its_replicas(
    tmp_path: Path, join: str | None
) -> None:
    """The replicas of a server with an api process wait for their next start."""
    one = object.__new__(Supervisor)
    one._config, one._max_deaths, one._api = ServerConfig(dp=2, join=join), 3, None
    one.channels = Channels(tmp_path)
    one._replicas = [_Replica(one.channels.of_replica(number, 0)) for number in range(2)]
    one._engine = [
        _Child("scheduler", subprocess.Popen(["true"]), Heartbeat(tmp_path / str(n)), replica=n)
        for n in range(2)
    ]
    deaths = iter([*one._engine, None])
    seen = []

    def next_death() -> _Child | None:
        child = next(deaths)
        if child is not None:
            child.process.wait()
            one._replicas[child.replica or 0].channels.drained_file.touch()
        seen.append(child)
        return child

    one._next_death = next_death  # type: ignore[method-assign]
    one.wait()
    assert len(seen) == (2 if join else 3)  # None: the server was stopped
    assert one._engine == []


def test_nothing_is_killed_without_a_step_timeout(children: list[_Child]) -> None:
    one = supervisor(children, age_s=100.0, step_timeout=0.0)
    one._start_limit_s = 20.0
    one._look_at_heartbeats()
    assert not any(child.hung for child in children)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_processes_end_does_not_interrupt_that(
    monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """As a Ctrl-C after a drain: processes and sockets would be left behind."""
    has_ended = []

    class Draining:
        def __init__(self, *arguments: object) -> None: ...
        def __enter__(self) -> "Draining":
            return self

        def wait(self) -> None:
            """The open requests are answered."""

        def __exit__(self, *error: object) -> None:
            signal.raise_signal(signum)
            has_ended.append(True)

    monkeypatch.setattr(launch, "prepare", lambda config: config)
    monkeypatch.setattr(launch, "Supervisor", Draining)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launch.serve(ServerConfig(port=0)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert has_ended


@pytest.mark.parametrize(
    ("name", "ours"), [("MALLOC_ARENA_MAX", "2"), ("OPENBLAS_NUM_THREADS", "1")]
)
def test_variables_for_the_processes_yield_to_those_of_the_user(
    name: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert _environment("api")[name] == ours
    monkeypatch.setenv(name, "7")
    assert _environment("api")[name] == "7"


def test_torch_may_compute_with_all_threads_of_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert "OPENBLAS_NUM_THREADS" not in _environment("worker")


def test_a_heartbeat_is_never_seen_half_written(tmp_path: Path) -> None:
    """A reader that looks all the time, beside a process that promises all the time. A record that looks empty is that of a process
    which has not started in time, and the supervisor would kill it."""
    heartbeat = Heartbeat(tmp_path / "busy")
    heartbeat.promise(1000)
    promising = (
        "import sys, pathlib, radixrt.base.heartbeat as h\n"
        "heartbeat = h.Heartbeat(pathlib.Path(sys.argv[1]))\n"
        "for _ in range(2_000_000): heartbeat.promise(1000, done=1)"
    )
    with subprocess.Popen([sys.executable, "-c", promising, str(tmp_path / "busy")]) as busy:
        while busy.poll() is None:
            for _ in range(1000):
                assert heartbeat.has_begun and not heartbeat.is_overdue()
    assert heartbeat.done == 2_000_000
    heartbeat.close()
