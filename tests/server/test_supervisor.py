"""The supervisor's look at the heartbeats of an engine."""

import os
import queue
import signal
import socket
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
from radixrt.base.liveness.heartbeat import MISSED_S, Activity, Heartbeat
from radixrt.base.liveness.link import (
    EnginesJoined,
    Link,
    ReplicaDrains,
    ServerStatus,
    ToSupervisor,
)
from radixrt.supervisor import launch
from radixrt.supervisor.child import Child, Launcher, environment
from radixrt.supervisor.engine import START_PATIENCE, Deaths, Engine, Replica
from radixrt.supervisor.supervisor import Supervisor
from radixrt.supervisor.watch import (
    LOOK_S,
    SILENCE_S,
    STUCK_PATIENCE,
    STUCK_S,
    Clock,
    Watch,
)

NOW = time.monotonic()
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def child_of(name: str, process: subprocess.Popen, file: Path, replica: int | None = None) -> Child:
    heartbeat = Heartbeat(file)
    watch = Watch(heartbeat, Activity(process.pid), finds_stopped=True)
    link = Link(socket.socketpair()[0], ToSupervisor)
    return Child(name, process, heartbeat, watch, link, replica)


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """Two processes that say nothing. Their supervisor's clock stands still."""
    clock = SimpleNamespace(monotonic=lambda: NOW, sleep=time.sleep)
    monkeypatch.setattr("radixrt.supervisor.engine.time", clock)
    made = [child_of(name, subprocess.Popen(SLEEP), tmp_path / name) for name in ("a", "b")]
    yield made
    for child in made:
        child.process.kill()
        child.process.wait()


def engine_of(children: list[Child], age_s: float, step_timeout: float = 4.0) -> Engine:
    config = ServerConfig(step_timeout=step_timeout)
    channels = SimpleNamespace(
        engine=1, next_engine=lambda: None, of_replica=Channels(Path()).of_replica
    )
    made = Engine(config, channels, Launcher(), 3, lambda status: None)  # type: ignore[arg-type]
    made.children, made.replicas, made._tokenizer_at = children, [], float("inf")
    set_age(children, age_s)
    return made


def look(engine: Engine) -> None:
    clock = Clock()
    clock.look(NOW)
    engine.look_at_heartbeats(clock, NOW)


def set_age(engine: list[Child], age_s: float) -> None:
    for child in engine:
        child.started_at = NOW - age_s


def test_a_further_engine_may_take_some_times_as_long_to_start_as_the_first(
    children: list[Child],
) -> None:
    one = engine_of(children, age_s=3600.0)
    look(one)
    assert not any(child.hung for child in children)  # the first may load a large model
    set_age(children, 2.0)
    for child in children:
        child.heartbeat.promise(60.0)
    look(one)
    assert one._start_limit_s == pytest.approx(2.0 * START_PATIENCE)


def test_a_process_that_hangs_at_its_start_is_killed(children: list[Child]) -> None:
    one = engine_of(children, age_s=19.0)
    one._start_limit_s = 20.0
    children[1].heartbeat.promise(60.0)
    look(one)
    assert not children[0].hung
    set_age(children, 21.0)
    look(one)
    assert children[0].hung and children[0].process.wait(10) < 0
    assert not children[1].hung


@pytest.mark.parametrize(
    ("tokens", "age_s", "is_the_end"), [(0, 5.0, True), (1, 5.0, False), (0, 601.0, False)]
)
def test_only_deaths_without_a_token_or_ten_minutes_of_life_between_them_are_counted(
    children: list[Child], tokens: int, age_s: float, is_the_end: bool
) -> None:
    one = engine_of(children, age_s)
    one.deaths = Deaths(2)
    one.start_due = lambda: None  # type: ignore[method-assign]
    children[0].name = "scheduler"
    children[0].heartbeat.promise(1.0, done=tokens)
    children[1].process.kill()
    children[1].process.wait()
    if is_the_end:
        with pytest.raises(EngineDiedError, match="The b process was killed by SIGKILL"):
            one.replace(children[1])
    else:
        one.replace(children[1])
        assert one.deaths.count == 1


@pytest.mark.parametrize("join", ["tcp://127.0.0.1:1", None])
def test_an_engine_ends_when_the_ingress_has_drained_all_its_replicas(
    tmp_path: Path, join: str | None
) -> None:
    """The replicas of a server with an api process wait for their next start."""
    one = object.__new__(Supervisor)
    config, channels = ServerConfig(dp=2, join=join), Channels(tmp_path)
    one._api = None
    one._engines = [Engine(config, channels, Launcher(), 3, lambda status: None)]
    (engine,) = one._engines
    engine.start_due = lambda: None  # type: ignore[method-assign]
    engine.children = [
        child_of("scheduler", subprocess.Popen(["true"]), tmp_path / str(n), replica=n)
        for n in range(2)
    ]
    deaths = iter([*engine.children, None])
    seen = []

    def next_death() -> Child | None:
        child = next(deaths)
        if child is not None:
            child.process.wait()
            engine.take(child, ReplicaDrains())
        seen.append(child)
        return child

    one._next_death = next_death  # type: ignore[method-assign]
    one.wait()
    assert len(seen) == (2 if join else 3)  # None: the server was stopped
    assert engine.children == []


def test_nothing_is_killed_without_a_step_timeout(children: list[Child]) -> None:
    one = engine_of(children, age_s=100.0, step_timeout=0.0)
    one._start_limit_s = 20.0
    look(one)
    assert not any(child.hung for child in children)


class Scene:
    """A process that beats, and the watch over it. The times are the test's."""

    def __init__(self, folder: Path, finds_stopped: bool = True, finds_stuck: bool = False) -> None:
        self.heartbeat = Heartbeat(folder / "scene")
        self.is_at_work = False
        activity = SimpleNamespace(
            is_seen=lambda: self.is_at_work, is_stuck=lambda beating: not self.is_at_work
        )
        self.watch = Watch(self.heartbeat, activity, finds_stopped, finds_stuck)  # type: ignore[arg-type]
        self.clock, self.at = Clock(), 1000.0

    def look(self, seconds: float, beats: bool) -> str:
        """What the last of the looks in these seconds finds."""
        found = ""
        for _ in range(round(seconds / LOOK_S)):
            found = self.look_after(LOOK_S, beats)
        return found

    def look_after(self, seconds: float, beats: bool) -> str:
        self.at += seconds
        if beats:
            self.heartbeat.record.beat_at = self.at
        self.clock.look(self.at)
        return self.watch.look(self.clock, self.at)

    def promise(self, within_s: float) -> None:
        self.heartbeat.record.due_at = self.at + within_s


def test_a_stopped_process_is_found_long_before_its_promise_is_broken(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.promise(30.0)
    assert not scene.look(10.0, beats=True)
    assert not scene.look(SILENCE_S, beats=False)
    assert "no sign of life" in scene.look(1.0, beats=False)


def test_a_process_that_works_or_gets_no_time_of_the_cpu_is_not_taken_for_stopped(
    tmp_path: Path,
) -> None:
    """A library may keep Python's lock, so that no thread beats."""
    scene = Scene(tmp_path)
    scene.promise(30.0)
    scene.look(1.0, beats=True)
    scene.is_at_work = True
    assert not scene.look(28.0, beats=False)
    assert "--step-timeout" in scene.look(2.0, beats=False)


def test_a_step_that_takes_its_time_is_no_hang_while_the_process_beats(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.promise(30.0)
    assert not scene.look(29.5, beats=True)
    assert "--step-timeout" in scene.look(1.0, beats=True)


def test_a_process_that_waits_for_itself_is_found_long_before_its_promise_is_broken(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, finds_stuck=True)
    scene.promise(30.0)
    scene.is_at_work = True
    assert not scene.look(10.0, beats=True)
    scene.is_at_work = False
    assert not scene.look(STUCK_S, beats=True)
    assert "waited for itself for 5 s" in scene.look(1.0, beats=True)


def test_a_step_may_wait_some_times_as_long_as_the_steps_before_it(tmp_path: Path) -> None:
    """For a device on which no thread of the process is seen at work."""
    scene = Scene(tmp_path, finds_stuck=True)
    scene.heartbeat.worked(2.0)
    scene.heartbeat.worked(0.1)
    for _ in range(3):
        scene.promise(60.0)
        assert not scene.look(10.0, beats=True)
    assert "waited for itself" in scene.look(STUCK_PATIENCE * 2.0 - 8.0, beats=True)
    for _ in range(200):
        scene.heartbeat.worked(0.1)
    scene.promise(60.0)
    assert scene.look(STUCK_S + 3.0, beats=True), "the long step was long ago"


def test_with_a_step_timeout_that_was_given_only_that_counts(tmp_path: Path) -> None:
    scene = Scene(tmp_path, finds_stopped=False)
    scene.promise(60.0)
    scene.look(1.0, beats=True)
    assert not scene.look(58.0, beats=False)
    assert "--step-timeout" in scene.look(2.0, beats=False)


def test_a_process_that_still_starts_may_be_silent(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.look(1.0, beats=True)
    assert not scene.look(100.0, beats=False)


def test_nobody_is_late_after_the_whole_machine_stood_still(tmp_path: Path) -> None:
    """The supervisor may look before the others run again."""
    scene = Scene(tmp_path)
    scene.promise(5.0)
    scene.look(1.0, beats=True)
    assert not scene.look_after(3600.0, beats=False)
    assert not scene.look(2.0, beats=False)
    assert scene.look(3.0, beats=False)


def test_a_process_that_does_not_end_delays_no_look_at_the_others(
    tmp_path: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the system still takes apart. Only after its end another one takes its place."""
    one = engine_of(children, age_s=5.0)
    one.channels = Channels(tmp_path)
    one.channels.folder.mkdir()
    started: list[str] = []

    def start(config: ServerConfig, module: str, *arguments: object, **options: object) -> Child:
        started.append(module)
        return child_of(module, subprocess.Popen(SLEEP), tmp_path / f"new-{module}")

    one._launcher.start = start  # type: ignore[method-assign, assignment]
    one.replicas = [Replica(one.channels.of_replica(0, 0))]
    stopped, dead = children
    stopped.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(stopped.process, "poll", lambda: None)
    monkeypatch.setattr(stopped.process, "kill", lambda: None)
    dead.process.kill()
    dead.process.wait()
    begin = time.perf_counter()
    one.replace(dead)
    one.start_due()
    assert time.perf_counter() - begin < 2.0 and one._launcher.ending == [stopped] and not started
    monkeypatch.undo()
    stopped.process.kill()
    assert stopped.process.wait(10) == -signal.SIGKILL
    one.start_due()
    assert started == ["worker", "scheduler", "tokenizer"]
    for child in one.children:
        child.process.kill()
        child.process.wait()


def test_a_death_is_noticed_though_a_process_that_it_has_started_holds_its_log_open() -> None:
    starting = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    ours, theirs = socket.socketpair()
    pipe = subprocess.PIPE
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", starting],
            stdout=pipe,
            stderr=pipe,
            text=True,
            pass_fds=[theirs.fileno()],
        )
    child = object.__new__(Child)
    child.name, child.replica, child.process = "worker", None, process
    child.link = Link(ours, ToSupervisor)
    news: queue.SimpleQueue = queue.SimpleQueue()
    child.follow(news, lambda line: None)
    assert news.get_nowait() == (child, None) and process.returncode == 0
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)  # it holds this pipe open, too


def test_nobody_waits_for_a_process_that_reads_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours, ToSupervisor)
        assert sum(1 for _ in iter(lambda: link.send(ServerStatus()), False)) > 100
    assert link.send(ServerStatus()), "it is gone"


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_processes_end_does_not_interrupt_that(
    monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """As a Ctrl-C after a drain: processes and sockets would be left behind."""
    has_ended = []

    class Draining:
        def __init__(self, *arguments: object, **models: object) -> None: ...
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
        assert launch.serve([ServerConfig(port=0)]) == 0
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
    assert environment("api")[name] == ours
    monkeypatch.setenv(name, "7")
    assert environment("api")[name] == "7"


def test_torch_may_compute_with_all_threads_of_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert "OPENBLAS_NUM_THREADS" not in environment("worker")


def test_a_heartbeat_is_never_seen_half_written(tmp_path: Path) -> None:
    """A reader that looks all the time, beside a process that promises all the time. A record that
    looks empty is that of a process which has not started in time, and the supervisor would kill
    it."""
    heartbeat = Heartbeat(tmp_path / "busy")
    heartbeat.promise(1000)
    promising = (
        "import sys, pathlib, radixrt.base.liveness.heartbeat as h\n"
        "heartbeat = h.Heartbeat(pathlib.Path(sys.argv[1]))\n"
        "for _ in range(2_000_000): heartbeat.promise(1000, done=1)"
    )
    with subprocess.Popen([sys.executable, "-c", promising, str(tmp_path / "busy")]) as busy:
        while busy.poll() is None:
            for _ in range(1000):
                assert heartbeat.has_begun and not heartbeat.is_overdue()
    assert heartbeat.record.done == 2_000_000
    heartbeat.close()


def test_a_process_without_beats_is_not_ready(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "worker")
    heartbeat.promise(30.0)
    assert heartbeat.is_well
    heartbeat.record.beat_at = time.monotonic()
    assert heartbeat.is_well
    heartbeat.record.beat_at -= MISSED_S + 0.1
    assert not heartbeat.is_well
    heartbeat.keep_beating()
    deadline = time.monotonic() + 5
    while not heartbeat.is_well:
        assert time.monotonic() < deadline


def a_member(name: str, replica: int | None, folder: Path) -> Child:
    """A process that works, as far as its heartbeat tells."""
    member = object.__new__(Child)
    member.name, member.replica, member.joined = name, replica, 0
    member.heartbeat = Heartbeat(folder / f"{name}{replica}")
    member.heartbeat.promise(60.0)
    return member


def test_a_server_is_ready_while_the_tokenizer_process_and_a_replica_are_well(
    tmp_path: Path,
) -> None:
    tokenizer = a_member("tokenizer", None, tmp_path)
    replicas = [
        a_member(name, replica, tmp_path) for replica in (0, 1) for name in ("worker", "scheduler")
    ]
    one = engine_of([tokenizer, *replicas], 0.0)
    assert one.is_well
    replicas[0].heartbeat.promise(-1.0)
    assert one.is_well
    replicas[3].heartbeat.promise(-1.0)
    assert not one.is_well
    tokenizer.joined = 1
    assert one.is_well, "an engine on another machine has joined"
    tokenizer.heartbeat.promise(-1.0)
    assert not one.is_well
    one.children = replicas
    assert not one.is_well


def test_an_engine_that_joins_an_ingress_is_ready_while_a_replica_belongs_to_it(
    tmp_path: Path,
) -> None:
    replicas = [
        a_member(name, replica, tmp_path) for replica in (0, 1) for name in ("worker", "scheduler")
    ]
    one = engine_of(replicas, 0.0)
    one.config = ServerConfig(dp=2, join="tcp://127.0.0.1:1")
    assert not one.is_well
    one.take(replicas[1], EnginesJoined(1))
    assert one.is_well
    replicas[0].heartbeat.promise(-1.0)
    assert not one.is_well, "its worker hangs"
    one.take(replicas[3], EnginesJoined(1))
    assert one.is_well
    one.take(replicas[3], EnginesJoined(0))
    assert not one.is_well
