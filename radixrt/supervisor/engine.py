"""The engine of one model: starts its processes, and starts them again when one dies or hangs.

The state of an engine is spread over its worker, scheduler and tokenizer processes. The death of a
worker or a scheduler is the end of the engine: the others are ended too, and a new engine is
started. If the tokenizer process dies, the next engine has a new one and the same scheduler and
workers, whose cache stays. With ``--dp``, an engine has several replicas, each a scheduler and its
workers. The death of one of these is the end of its replica only, which is started again. A
scheduler that is told to end (SIGTERM, or by an admin) lets its replica's requests go on in others
first, and ends with status 0. An engine of several is loaded and unloaded as the api process says.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.liveness.heartbeat import work_limit_s
from radixrt.base.liveness.link import (
    CannotStart,
    EnginesJoined,
    ReplicaDrains,
    ServerStatus,
    StartReplica,
    ToSupervisor,
)
from radixrt.supervisor.child import Child, Launcher
from radixrt.supervisor.kept_memory import KeptMemory, is_trusted_after
from radixrt.supervisor.watch import Clock

log = logging.getLogger(__name__)

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


@dataclass
class Deaths:
    """The deaths of an engine or of a replica since its last token."""

    count: int = 0

    def add(self, dead: Child, members: list[Child]) -> None:
        """
        Args:
            dead: the process that has ended.
            members: the processes that end with it.
        """
        tokens = sum(child.heartbeat.record.done for child in members)
        is_healthy = tokens or time.monotonic() - dead.started_at > HEALTHY_S
        self.count = 1 if is_healthy else self.count + 1

    @property
    def delay_s(self) -> float:
        """The time until the next start, in seconds."""
        return (
            min(FIRST_DELAY_S * 2 ** (self.count - 2), LONGEST_DELAY_S) if self.count > 1 else 0.0
        )


@dataclass(eq=False)
class Replica:
    """A scheduler and its workers."""

    channels: Channels
    """Of its last start."""
    deaths: Deaths = field(default_factory=Deaths)
    restart_at: float = math.inf
    """Time of ``time.monotonic()`` from which on it is started, unless it is drained; infinity: it
    lives."""
    is_drained: bool = False
    """An admin has drained it."""
    kept: KeptMemory = field(default_factory=KeptMemory)


class Engine:
    """The processes that serve one model."""

    def __init__(
        self,
        config: ServerConfig,
        channels: Channels,
        launcher: Launcher,
        max_deaths: int,
        publish: Callable[[ServerStatus], None],
        number: int | None = None,
        is_loaded: bool = True,
    ) -> None:
        """
        Args:
            number: of its model; None: the server has only one.
            is_loaded: it starts now.
            max_deaths: engines that may end without a token between them. 1: the first death is the
                last.
            publish: tells the api process a new status.
        """
        self.config = config
        self.channels = channels
        self.children: list[Child] = []
        self.replicas = [
            Replica(channels.of_replica(n, 0), restart_at=0.0) for n in range(config.dp)
        ]
        self.deaths = Deaths()
        self.number = number or 0
        self.is_loaded = is_loaded
        self.status = ServerStatus(model=self.number, is_loaded=is_loaded, is_well=False)
        """What its processes and the api process know."""
        self._model = "" if number is None else config.model_name
        self._loads = int(is_loaded)
        self._failure = ""
        self._launcher = launcher
        self._max_deaths = max_deaths
        self._publish_to_api = publish
        self._start_limit_s: float | None = None
        """Longest time in which an engine starts; None: the first one has not started yet."""
        self._tokenizer_at = 0.0 if config.join is None else math.inf
        """Time of ``time.monotonic()`` from which on the tokenizer process is started; infinity: it
        lives, or there is none."""

    # ------------------------------------------------------------ starting

    def start_due(self) -> None:
        """Start the processes whose time has come, once those before them are gone: they need their
        memory."""
        now = time.monotonic()
        ending = self._launcher.ending
        ending[:] = [child for child in ending if child.process.poll() is None]
        if not self.is_loaded or (self._model and not self.children and ending):
            return  # those of other models still have their memory
        in_use = {child.replica for child in ending}
        for number, replica in enumerate(self.replicas):
            place = number if self.config.is_routed else None
            if replica.restart_at <= now and not replica.is_drained and place not in in_use:
                replica.restart_at = math.inf
                self._start_replica(replica)
        self.publish()
        # The tokenizer process is told the start of one scheduler when it starts itself.
        is_alone = not self.config.is_routed and self.replicas[0].restart_at < math.inf
        if self._tokenizer_at <= now and not is_alone and None not in in_use:
            self._tokenizer_at = math.inf
            self._start("tokenizer", self.channels)

    def _start_replica(self, replica: Replica) -> None:
        """Start a scheduler and its workers."""
        channels = replica.channels
        channels.folder.mkdir(mode=0o700, exist_ok=True)
        kept = replica.kept if self._keeps_memory else None
        for rank in range(self.config.tp):
            name = "worker" if rank == 0 else f"worker{rank}"
            self._start("worker", channels, "--rank", str(rank), name=name, kept=kept)
        self._start("scheduler", channels, kept=kept)

    @property
    def _keeps_memory(self) -> bool:
        """Whether KV may outlive the workers."""
        return (
            self._max_deaths > 1
            and self.config.shared_kv_pool != "off"
            and hasattr(os, "memfd_create")
        )

    def _start(
        self,
        module: str,
        channels: Channels,
        *arguments: str,
        name: str = "",
        kept: KeptMemory | None = None,
    ) -> None:
        start = self._launcher.start
        fd = None if kept is None else kept.fd(name or module)
        if fd is not None:
            arguments += ("--kept-fd", str(fd))
        child = start(
            self.config,
            module,
            channels,
            *arguments,
            name=name,
            model=self._model,
            pass_fd=fd,
            status=self.status,
        )
        self.children.append(child)

    # ------------------------------------------------------------ watching

    def take(self, child: Child, message: ToSupervisor) -> None:
        """Note what one of its processes, or the api process, tells."""
        match message:
            case ReplicaDrains():
                self.replicas[child.replica or 0].is_drained = True
            case StartReplica() if message.replica < len(self.replicas):
                self.replicas[message.replica].is_drained = False
            case EnginesJoined():
                child.joined = message.count
            case CannotStart():
                child.cannot_start = message.reason

    def publish(self) -> None:
        """Tell all processes what they do not know yet."""
        replicas = dict(enumerate(self.replicas))
        lives = [n for n, r in replicas.items() if r.restart_at == math.inf and self.is_loaded]
        self.status = ServerStatus(
            model=self.number,
            loads=self._loads,
            is_loaded=self.is_loaded,
            failure=self._failure,
            engine=self.channels.engine,
            starts={n: replicas[n].channels.start for n in lives},
            drained=[n for n, replica in replicas.items() if replica.is_drained],
            is_well=self.is_well,
        )
        for child in self.children:
            child.tell(self.status)
        self._publish_to_api(self.status)

    @property
    def is_well(self) -> bool:
        """The engine can take requests, as far as heartbeats tell."""
        tokenizer = next((child for child in self.children if child.name == "tokenizer"), None)
        members: dict[int | None, list[Child]] = {}
        for child in self.children:
            if child is not tokenizer:
                members.setdefault(child.replica, []).append(child)
        well = [some for some in members.values() if all(child.heartbeat.is_well for child in some)]
        if self.config.join is not None:
            return any(child.joined for some in well for child in some)
        is_led = tokenizer is not None and tokenizer.heartbeat.is_well
        return is_led and bool(well or (tokenizer and tokenizer.joined))

    def look_at_heartbeats(self, clock: Clock, now: float) -> None:
        """Kill a process that hangs.

        Args:
            now: time of ``time.monotonic()``.
        """
        work_limit = work_limit_s(self.config.step_timeout)
        if self._start_limit_s is None and all(c.heartbeat.has_begun for c in self.children):
            age_s = now - min((child.started_at for child in self.children), default=now)
            self._start_limit_s = max(START_PATIENCE * age_s, work_limit)
        limit_s = math.inf if work_limit == math.inf else self._start_limit_s or math.inf
        for child in self.children:
            child.kill_if_hung(clock, now, is_late=now - child.started_at > limit_s)

    # ------------------------------------------------------------ loading

    @property
    def has_served(self) -> bool:
        """All its processes have once lived at the same time."""
        return self._start_limit_s is not None

    def load(self) -> None:
        """Start the processes of a model that is not loaded."""
        self._loads += 1
        if not self.is_loaded:
            self.is_loaded, self._failure, self.deaths = True, "", Deaths()
            self._tokenizer_at = 0.0
            for replica in self.replicas:
                replica.restart_at, replica.deaths = 0.0, Deaths()
        self.publish()
        self.start_due()

    def unload(self, failure: str = "") -> None:
        """End the processes.

        Args:
            failure: why they can't be started, or not again.
        """
        if not self.is_loaded:
            return
        self.is_loaded, self._failure = False, failure
        self.channels.next_engine()
        for replica in self.replicas:
            replica.kept.drop()
            self._begin_start(replica)
        self._end_members(self.children)
        self.publish()

    # ------------------------------------------------------------ ending

    def replace(self, dead: Child) -> None:
        """Start again what has ended with the death of a process: the engine, or a replica.

        Raises:
            EngineDiedError: too many engines have ended, or the replica has died too often, and no
                other replica lives.
        """
        if dead.replica is None or self._max_deaths == 1:
            self._replace_all(dead)
        else:
            self._end_replica(dead, self.replicas[dead.replica])

    @property
    def has_left(self) -> bool:
        """The ingress that the engine has joined has drained all its replicas: nobody can start
        them again from there."""
        return self.config.join is not None and all(one.is_drained for one in self.replicas)

    def _replace_all(self, dead: Child) -> None:
        """Let a new engine start after a pause that grows from death to death. Replicas stay if
        only the tokenizer process has died."""
        members = [dead] if dead.name == "tokenizer" else self.children
        self.deaths.add(dead, members)
        death = dead.death()
        if self.deaths.count >= self._max_deaths:
            raise death
        log.error("%s\nA new engine is started; open requests go on in it.", death)
        self.channels.next_engine()  # first: from here on, the server is not ready
        self._tokenizer_at = time.monotonic() + self.deaths.delay_s
        if members is self.children:
            for replica in self.replicas:
                if not is_trusted_after(members, self.deaths.count):
                    replica.kept.drop()
                self._begin_start(replica)
                replica.restart_at = self._tokenizer_at
        self.publish()
        self._end_members(members)
        self.start_due()

    def _end_replica(self, dead: Child, replica: Replica) -> None:
        """End the other processes of a replica, and start it again: at once, or after a pause if it
        died soon after its last start. One that an admin has drained waits."""
        members = [child for child in self.children if child.replica == dead.replica]
        if dead.name == "scheduler" and dead.process.returncode == 0:
            log.warning("Replica %d has drained.", dead.replica)
        else:
            self._count_death(dead, replica, members)
        if replica.is_drained or not is_trusted_after(members, replica.deaths.count):
            replica.kept.drop()
        self._begin_start(replica)
        self.publish()  # first: its requests go on now
        self._end_members(members)
        self.start_due()

    def _begin_start(self, replica: Replica) -> None:
        """Remove the files of a replica's last start, and let the next one come."""
        shutil.rmtree(replica.channels.folder, ignore_errors=True)
        replica.channels = self.channels.of_replica(
            replica.channels.replica or 0, replica.channels.start + 1
        )
        replica.restart_at = time.monotonic() + replica.deaths.delay_s

    def _end_members(self, members: list[Child]) -> None:
        self._launcher.kill(members)
        self.children = [child for child in self.children if child not in members]

    def _count_death(self, dead: Child, replica: Replica, members: list[Child]) -> None:
        """Raises EngineDiedError if it has died too often, and no other replica lives."""
        replica.deaths.add(dead, members)
        death = dead.death()
        others_live = any(
            other.restart_at == math.inf for other in self.replicas if other is not replica
        )
        others_live |= self.config.replica_listen is not None  # or may join
        if replica.deaths.count >= self._max_deaths and not others_live:
            raise death
        log.error("%s\nThe replica is started again; its open requests go on in others.", death)
