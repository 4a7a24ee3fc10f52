"""Starts an engine's processes, watches them, starts them again when one dies or hangs, and ends
them together.

The state of an engine is spread over its worker, scheduler and tokenizer processes. The death of a
worker or a scheduler is the end of the engine: the others are ended too, and a new engine is
started. The api process outlives engines. It holds the open requests and hands them to the next
engine (:mod:`radixrt.client.engine_client`). If the tokenizer process dies, the next engine has a
new one and the same scheduler and workers, whose cache stays. With ``--dp``, an engine has several
replicas, each a scheduler and its workers. The death of one of these is the end of its replica
only, which is started again. A scheduler that is told to end (SIGTERM, or by an admin) lets its
replica's requests go on in others first, and ends with status 0.
"""

import contextlib
import logging
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.child import write_config
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.activity import Activity
from radixrt.base.liveness.heartbeat import Heartbeat, work_limit_s
from radixrt.base.liveness.link import (
    CannotStart,
    EnginesJoined,
    Link,
    ReplicaDrains,
    ServerStatus,
    StartReplica,
    ToSupervisor,
)
from radixrt.base.liveness.supervision import start_thread
from radixrt.device.host_memory import available_memory
from radixrt.models.memory_need import loads_weights, memory_sentence
from radixrt.supervisor.watch import LOOK_S, Clock, Watch

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 40
STOP_TIMEOUT_S = 5.0
LOG_END_S = 1.0
"""For which the end of a dead process's log is waited for, which a process that it has started may
hold open."""
MAX_DEATHS = 3
"""Engines that end one after the other without a token between them; then the server ends."""
FIRST_DELAY_S = 0.5
"""Before the second restart in a row; each further one waits twice as long."""
LONGEST_DELAY_S = 30.0
"""Before any restart. An engine ends the server sooner; a replica is started again as long as
others live."""
HEALTHY_S = 600.0
"""An engine that has lived so long has not died of its start, though nobody has asked it for a
token."""

START_PATIENCE = 10
"""Limit of the start of a further engine, in multiples of that of the first one, which has no
limit."""

SHORT_SPINS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
"""For OpenMP's libraries, which torch computes with on a CPU. By default its threads look for
further work for milliseconds after each operation, and keep those of the native kernels and the
other processes from their cores meanwhile."""

FEW_HEAPS = {"MALLOC_ARENA_MAX": "2"}
"""For glibc. Threads load grammars, fill masks and encode texts, and each can get a heap of its
own, up to eight for each CPU core. A heap keeps what is freed in it: with 256 grammars that came
and went, 38 MB in 16 heaps, 12 MB in one."""

ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""For numpy's OpenBLAS in all processes but workers, where torch may compute with OpenBLAS, too (on
ARM). Otherwise its threads start, and spin, with the import of numpy: 0.05 s of CPU time a process
on two cores."""


@dataclass(eq=False)
class _Child:
    """One process."""

    name: str
    process: subprocess.Popen[str]
    heartbeat: Heartbeat
    watch: Watch
    link: Link[ToSupervisor]
    replica: int | None = None
    """Number of the replica that it is part of; None: of none, or of the only one."""
    started_at: float = field(default_factory=time.monotonic)
    log_tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL_LINES))
    last_status: ServerStatus | None = None
    is_ending: bool = False
    """The supervisor ends it, so that its end is no news."""
    joined: int = 0
    """Engines of other machines that have joined a tokenizer process; 1 for a scheduler that has
    joined an ingress."""
    cannot_start: str = ""
    """The reason for which it ended, if it could not start."""
    hung: str = ""
    """How it hung, if it was killed for that."""
    loads: Callable[[], str] | None = None
    """Says how much memory its model needs and how much there was; None: it loads none into this
    machine's memory."""

    @property
    def label(self) -> str:
        """Its name among all processes of the server."""
        return self.name if self.replica is None else f"{self.name}.{self.replica}"

    def follow(self, news: "queue.SimpleQueue[_News]", show_log: Callable[[str], None]) -> None:
        """Pass on what the child tells, and its death, which is the end of the link."""
        log_thread = start_thread(
            self._follow_log,
            show_log,
            name=f"log of the {self.label} process",
            on_failure=lambda reason: self.process.kill(),  # it would wait for a reader
        )
        for message in self.link.messages():
            news.put((self, message))
        self.link.close()
        self.process.wait()
        log_thread.join(LOG_END_S)
        news.put((self, None))

    def _follow_log(self, show: Callable[[str], None]) -> None:
        """Pass the child's log on, and keep its end."""
        assert self.process.stderr is not None
        with self.process.stderr as log_lines:
            for line in log_lines:  # to the end: a full pipe would block the child
                self.log_tail.append(line)
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone
                    show(line)

    def tell(self, status: ServerStatus) -> None:
        """Tell it what it was not told yet. If it reads nothing, the next attempt tells the
        latest."""
        if status != self.last_status and self.link.send(status):
            self.last_status = status

    def kill_if_hung(self, clock: Clock, at: float, is_late: bool) -> None:
        """
        Args:
            at: time of ``time.monotonic()``.
            is_late: the engine should have started by now.
        """
        hung = self.watch.look(clock, at)
        if is_late and not self.heartbeat.has_begun:
            hung = "took too long to start"
        if hung and not self.hung:
            self.hung = hung
            self.process.kill()

    def death(self) -> EngineDiedError:
        """The way it ended, and the end of its log."""
        status = self.process.returncode
        if self.hung:
            how = f"{self.hung}, and was killed"
        elif status == -signal.SIGKILL and self.loads and not self.heartbeat.has_begun:
            how = f"was killed while it loaded the model, probably because memory ran out. {self.loads()}"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        tail = "".join(f"    {line}" for line in self.log_tail)
        return EngineDiedError(
            f"The {self.label} process {how.removesuffix('.')}. The end of its log:\n{tail or '    (empty)'}"
        )


_News = tuple[_Child, ToSupervisor | None] | None
"""A message of a process, or its death; None: the server was stopped."""


@dataclass
class _Deaths:
    """The deaths of an engine or of a replica since its last token."""

    count: int = 0

    def add(self, dead: _Child, members: list[_Child]) -> None:
        """
        Args:
            dead: the process that has ended.
            members: the processes that end with it.
        """
        tokens = sum(child.heartbeat.done for child in members)
        is_healthy = tokens or time.monotonic() - dead.started_at > HEALTHY_S
        self.count = 1 if is_healthy else self.count + 1

    @property
    def delay_s(self) -> float:
        """The time until the next start, in seconds."""
        return (
            min(FIRST_DELAY_S * 2 ** (self.count - 2), LONGEST_DELAY_S) if self.count > 1 else 0.0
        )


@dataclass(eq=False)
class _Replica:
    """A scheduler and its workers."""

    channels: Channels
    """Of its last start."""
    deaths: _Deaths = field(default_factory=_Deaths)
    restart_at: float = math.inf
    """Time of ``time.monotonic()`` from which on it is started, unless it is drained; infinity: it
    lives."""
    is_drained: bool = False
    """An admin has drained it."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


class Supervisor:
    """The processes of one server. Use as a context manager: its exit ends all processes."""

    def __init__(
        self,
        config: ServerConfig,
        listen_socket: socket.socket | None = None,
        max_deaths: int = 1,
        api_stdout: int | None = None,
        show_log: Callable[[str], None] = _to_stderr,
    ) -> None:
        """Start all processes.

        Args:
            listen_socket: listens already; with it the api process is started, too, and owns it
                from then on.
            max_deaths: engines that may end without a token between them. 1: the first death is the
                last.
            api_stdout: where the api process prints its banner; None is this process's standard
                output.
            show_log: takes each line of the processes' logs, in threads.
        """
        self._config = config
        self._max_deaths = max_deaths
        self._show_log = show_log
        self._deaths = _Deaths()
        self._start_limit_s: float | None = None
        """Longest time in which an engine starts; None: the first one has not started yet."""
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self.status = ServerStatus(is_well=False)
        """What all processes know."""
        self._api: _Child | None = None
        self._engine: list[_Child] = []
        self._ending: list[_Child] = []
        """Processes that were killed. Those that take their places start when they are gone."""
        self._tokenizer_at = 0.0 if config.join is None else math.inf
        """Time of ``time.monotonic()`` from which on the tokenizer process is started; infinity: it
        lives, or there is none."""
        self._clock = Clock()
        self._stopping = self._draining = False
        self.channels = Channels(Channels.make_run_dir())
        self._replicas = [
            _Replica(self.channels.of_replica(n, 0), restart_at=0.0) for n in range(config.dp)
        ]
        write_config(self.channels.run_dir, config)
        try:
            self._start_due()
            if listen_socket is not None:
                fd = listen_socket.fileno()
                self._api = self._start(
                    "api", self.channels, "--listen-fd", str(fd), pass_fd=fd, stdout=api_stdout
                )
                listen_socket.close()  # so that nobody waits for an answer once the api process has ended
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; the workers of a tensor-parallel engine are worker, worker1,
        worker2, ...; the processes of a replica have its number behind a dot."""
        return {child.label: child.process.pid for child in self._children}

    def wait(self) -> None:
        """Watch until :meth:`stop` is called by another thread, the api process has drained, a
        signal handler raises, or the ingress that the engine has joined has drained all its
        replicas: nobody can start them again from there.

        Raises:
            ConfigError: a process could not start because of a setting, a checkpoint or the
                machine.
            EngineDiedError: the api process ended on its own, or too many engines did; says which
                process, and the end of its log.
        """
        while (child := self._next_death()) is not None:
            if child is self._api and self._draining:
                return
            if child.cannot_start:
                raise ConfigError(child.cannot_start)
            if child is self._api:
                raise child.death()
            if child.replica is None or self._max_deaths == 1:
                self._replace_engine(child)
            else:
                self._end_replica(child, self._replicas[child.replica])
                is_drained = all(one.is_drained for one in self._replicas)
                if self._config.join is not None and is_drained:
                    return

    def drain(self) -> None:
        """Ask the api process to finish the open requests and to end; :meth:`wait` returns when it
        has."""
        self._draining = True
        if self._api is not None:
            self._api.process.terminate()

    def reload_keys(self) -> None:
        """Ask the api process to read the key file again."""
        if self._api is not None:
            self._api.process.send_signal(signal.SIGHUP)

    def stop(self, reason: str = "The server was stopped.") -> None:
        """End all processes and remove the sockets. May be called twice.

        Args:
            reason: for the clients whose answers are cut off.
        """
        if self._api is not None and not self._stopping:
            self._api.tell(msgspec.structs.replace(self.status, shutdown_reason=reason))
        self._stopping = True
        self._news.put(None)
        _end([*self._children, *self._ending])
        self._engine, self._api = [], None
        shutil.rmtree(self.channels.run_dir, ignore_errors=True)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EngineDiedError):
            self.stop(f"The engine ended: {str(error).splitlines()[0]}")
        else:
            self.stop()

    # ------------------------------------------------------------ starting

    @property
    def _children(self) -> list[_Child]:
        return [*self._engine, *([self._api] if self._api else [])]

    def _start_replica(self, channels: Channels) -> None:
        """Start a scheduler and its workers."""
        channels.folder.mkdir(mode=0o700, exist_ok=True)
        for rank in range(self._config.tp):
            name = "worker" if rank == 0 else f"worker{rank}"
            worker = self._start("worker", channels, "--rank", str(rank), name=name)
            self._engine.append(worker)
        self._engine.append(self._start("scheduler", channels))

    def _start(
        self,
        module: str,
        channels: Channels,
        *arguments: str,
        name: str = "",
        pass_fd: int | None = None,
        stdout: int | None = None,
    ) -> _Child:
        name = name or module
        ours, theirs = socket.socketpair()
        link_fd = theirs.fileno()
        # -P: a file of the user's folder called http.py must not stand in for the standard
        # library's
        command = [sys.executable, "-P", "-m", f"radixrt.{module}", "--link-fd", str(link_fd)]
        place = ["--run-dir", str(channels.run_dir), "--engine", str(channels.engine)]
        if channels.replica is not None:
            place += ["--replica", str(channels.replica), "--start", str(channels.start)]
        with theirs:
            process = subprocess.Popen(
                [*command, *place, *arguments],
                stdout=stdout,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env=_environment(module),
                text=True,
                errors="replace",
                pass_fds=[link_fd] if pass_fd is None else [link_fd, pass_fd],
                process_group=0,  # Ctrl-C is the supervisor's to handle
            )
        heartbeat = Heartbeat(channels.heartbeat_file(name))
        finds_stopped = self._config.step_timeout is None
        # The end of the api process is that of the server, and ranks wait for each other.
        waits_for_others = module == "api" or (module == "worker" and self._config.tp > 1)
        finds_stuck = finds_stopped and not waits_for_others
        watch = Watch(heartbeat, Activity(process.pid), finds_stopped, finds_stuck)
        replica = channels.replica if self._config.is_routed else None
        loads = (
            partial(memory_sentence, self._config, available_memory())
            if module == "worker" and loads_weights(self._config)
            else None
        )
        child = _Child(
            name, process, heartbeat, watch, Link(ours, ToSupervisor), replica, loads=loads
        )
        child.tell(self.status)
        start_thread(
            child.follow, self._news, self._show_log, name=f"link of the {child.label} process"
        )
        return child

    # ------------------------------------------------------------ watching

    def _next_death(self) -> _Child | None:
        """Wait for the unexpected end of a process; None: :meth:`stop` was called."""
        look_at = 0.0
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                news = self._news.get(timeout=LOOK_S)
                if news is None or self._stopping:
                    return None
                child, message = news
                if message is not None:
                    self._take(child, message)
                elif not child.is_ending:
                    return child
            if (now := time.monotonic()) >= look_at:
                self._look_at_heartbeats()
                look_at = now + LOOK_S
            if not self._stopping:
                self._start_due()
        return None

    def _take(self, child: _Child, message: ToSupervisor) -> None:
        match message:
            case ReplicaDrains():
                self._replicas[child.replica or 0].is_drained = True
            case StartReplica() if message.replica < len(self._replicas):
                self._replicas[message.replica].is_drained = False
            case EnginesJoined():
                child.joined = message.count
            case CannotStart():
                child.cannot_start = message.reason

    def _publish(self) -> None:
        """Tell all processes what they do not know yet."""
        replicas = dict(enumerate(self._replicas))
        self.status = ServerStatus(
            engine=self.channels.engine,
            starts={n: r.channels.start for n, r in replicas.items() if r.restart_at == math.inf},
            drained=[n for n, replica in replicas.items() if replica.is_drained],
            is_well=self._is_well(),
        )
        for child in self._children:
            child.tell(self.status)

    def _is_well(self) -> bool:
        """The engine can take requests, as far as heartbeats tell."""
        tokenizer = next((child for child in self._engine if child.name == "tokenizer"), None)
        members: dict[int | None, list[_Child]] = {}
        for child in self._engine:
            if child is not tokenizer:
                members.setdefault(child.replica, []).append(child)
        well = [some for some in members.values() if all(child.heartbeat.is_well for child in some)]
        if self._config.join is not None:
            return any(child.joined for some in well for child in some)
        is_led = tokenizer is not None and tokenizer.heartbeat.is_well
        return is_led and bool(well or (tokenizer and tokenizer.joined))

    def _look_at_heartbeats(self) -> None:
        """Kill a process that hangs."""
        now = time.monotonic()
        self._clock.look(now)
        work_limit = work_limit_s(self._config.step_timeout)
        if self._start_limit_s is None and all(c.heartbeat.has_begun for c in self._engine):
            age_s = now - min((child.started_at for child in self._engine), default=now)
            self._start_limit_s = max(START_PATIENCE * age_s, work_limit)
        limit_s = math.inf if work_limit == math.inf else self._start_limit_s or math.inf
        for child in self._children:
            is_late = child is not self._api and now - child.started_at > limit_s
            child.kill_if_hung(self._clock, now, is_late)

    def _replace_engine(self, dead: _Child) -> None:
        """Let a new engine start after a pause that grows from death to death. Replicas stay if
        only the tokenizer process has died.

        Raises:
            EngineDiedError: too many engines have ended.
        """
        members = [dead] if dead.name == "tokenizer" else self._engine
        self._deaths.add(dead, members)
        death = dead.death()
        if self._deaths.count >= self._max_deaths:
            raise death
        log.error("%s\nA new engine is started; open requests go on in it.", death)
        self.channels.next_engine()  # first: from here on, the server is not ready
        self._tokenizer_at = time.monotonic() + self._deaths.delay_s
        if members is self._engine:
            for replica in self._replicas:
                self._begin_start(replica)
                replica.restart_at = self._tokenizer_at
        self._publish()
        self._end_members(members)
        self._start_due()

    def _end_replica(self, dead: _Child, replica: _Replica) -> None:
        """End the other processes of a replica, and start it again: at once, or after a pause if it
        died soon after its last start. One that an admin has drained waits.

        Raises:
            EngineDiedError: it has died too often, and no other replica lives.
        """
        members = [child for child in self._engine if child.replica == dead.replica]
        if dead.name == "scheduler" and dead.process.returncode == 0:
            log.warning("Replica %d has drained.", dead.replica)
        else:
            self._count_death(dead, replica, members)
        self._begin_start(replica)
        self._publish()  # first: its requests go on now
        self._end_members(members)
        self._start_due()

    def _begin_start(self, replica: _Replica) -> None:
        """Remove the files of a replica's last start, and let the next one come."""
        shutil.rmtree(replica.channels.folder, ignore_errors=True)
        replica.channels = self.channels.of_replica(
            replica.channels.replica or 0, replica.channels.start + 1
        )
        replica.restart_at = time.monotonic() + replica.deaths.delay_s

    def _end_members(self, members: list[_Child]) -> None:
        """At once: a scheduler that is only asked to end would announce that its replica drains."""
        for child in members:
            child.is_ending = True
            child.process.kill()
            child.heartbeat.close()
        self._ending += members
        self._engine = [child for child in self._engine if child not in members]

    def _count_death(self, dead: _Child, replica: _Replica, members: list[_Child]) -> None:
        """Raises:
        EngineDiedError: it has died too often, and no other replica lives.
        """
        replica.deaths.add(dead, members)
        death = dead.death()
        others_live = any(
            other.restart_at == math.inf for other in self._replicas if other is not replica
        )
        others_live |= self._config.replica_listen is not None  # or may join
        if replica.deaths.count >= self._max_deaths and not others_live:
            raise death
        log.error("%s\nThe replica is started again; its open requests go on in others.", death)

    def _start_due(self) -> None:
        """Start the processes whose time has come, once those before them are gone: they need their
        memory."""
        now = time.monotonic()
        self._ending = [child for child in self._ending if child.process.poll() is None]
        in_use = {child.replica for child in self._ending}
        for number, replica in enumerate(self._replicas):
            place = number if self._config.is_routed else None
            if replica.restart_at <= now and not replica.is_drained and place not in in_use:
                replica.restart_at = math.inf
                self._start_replica(replica.channels)
        self._publish()
        # The tokenizer process is told the start of one scheduler when it starts itself.
        is_alone = not self._config.is_routed and self._replicas[0].restart_at < math.inf
        if self._tokenizer_at <= now and not is_alone and None not in in_use:
            self._tokenizer_at = math.inf
            self._engine.append(self._start("tokenizer", self.channels))


def _end(children: list[_Child]) -> None:
    """Returns when they are gone."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for child in children:
        child.is_ending = True
        child.process.terminate()
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _environment(module: str) -> dict[str, str]:
    """Children import radixrt from the path of this process. Variables that the user has set are
    not changed."""
    package_parent = str(Path(__file__).parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {**SHORT_SPINS, **FEW_HEAPS, **({} if module == "worker" else ONE_BLAS_THREAD)}
    return {**ours, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
