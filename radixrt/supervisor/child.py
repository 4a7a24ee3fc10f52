"""A process of a server: what the supervisor knows of it, its start, its link and its death."""

import contextlib
import os
import queue
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

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import EngineDiedError
from radixrt.base.liveness.heartbeat import Activity, Heartbeat
from radixrt.base.liveness.link import Link, ServerStatus, ToSupervisor
from radixrt.base.liveness.supervision import start_thread
from radixrt.device.machine import available_memory
from radixrt.models.memory_need import loads_weights, memory_sentence
from radixrt.supervisor.watch import Clock, Watch

LOG_TAIL_LINES = 40
STOP_TIMEOUT_S = 5.0
LOG_END_S = 1.0
"""For which the end of a dead process's log is waited for, which a process that it has started may
hold open."""

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
class Child:
    """One process."""

    name: str
    process: subprocess.Popen[str]
    heartbeat: Heartbeat
    watch: Watch
    link: Link[ToSupervisor]
    replica: int | None = None
    """Number of the replica that it is part of; None: of none, or of the only one."""
    model: str = ""
    """Name of the model that it serves; "": the server has only one."""
    started_at: float = field(default_factory=time.monotonic)
    log_tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL_LINES))
    last_status: dict[int, ServerStatus] = field(default_factory=dict)
    """What it was told last of each model."""
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
        return label_of(self.name, self.replica, self.model)

    def follow(self, news: "queue.SimpleQueue[News]", show_log: Callable[[str], None]) -> None:
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
        if status != self.last_status.get(status.model) and self.link.send(status):
            self.last_status[status.model] = status

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


def label_of(name: str, replica: int | None, model: str) -> str:
    name = name if replica is None else f"{name}.{replica}"
    return f"{model}/{name}" if model else name


News = tuple[Child, ToSupervisor | None] | None
"""A message of a process, or its death; None: the server was stopped."""


def to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


@dataclass(eq=False)
class Launcher:
    """Starts processes of one server, and ends them."""

    show_log: Callable[[str], None] = to_stderr
    """Takes each line of the processes' logs, in threads."""
    news: "queue.SimpleQueue[News]" = field(default_factory=queue.SimpleQueue)
    """What the processes tell, and their deaths."""
    ending: list[Child] = field(default_factory=list)
    """Processes that were killed. Those that take their places start when they are gone."""

    def start(
        self,
        config: ServerConfig,
        module: str,
        channels: Channels,
        *arguments: str,
        name: str = "",
        model: str = "",
        pass_fd: int | None = None,
        stdout: int | None = None,
        status: ServerStatus,
    ) -> Child:
        """Start a process of ``radixrt.<module>``, which gets the status first.

        Args:
            pass_fd: open in the process, too.
        """
        name = name or module
        replica = channels.replica if config.is_routed else None
        label = label_of(name, replica, model)
        ours, theirs = socket.socketpair()
        link_fd = theirs.fileno()
        # -P: a file of the user's folder called http.py must not stand in for the standard
        # library's
        command = [sys.executable, "-P", "-m", f"radixrt.{module}", "--link-fd", str(link_fd)]
        place = [
            "--run-dir",
            str(channels.run_dir),
            "--engine",
            str(channels.engine),
            "--label",
            label,
        ]
        if channels.replica is not None:
            place += ["--replica", str(channels.replica), "--start", str(channels.start)]
        with theirs:
            process = subprocess.Popen(
                [*command, *place, *arguments],
                stdout=stdout,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env=environment(module),
                text=True,
                errors="replace",
                pass_fds=[link_fd] if pass_fd is None else [link_fd, pass_fd],
                process_group=0,  # Ctrl-C is the supervisor's to handle
            )
        heartbeat = Heartbeat(channels.heartbeat_file(name))
        finds_stopped = config.step_timeout is None
        # The end of the api process is that of the server, and ranks wait for each other.
        waits_for_others = module == "api" or (module == "worker" and config.tp > 1)
        finds_stuck = finds_stopped and not waits_for_others
        watch = Watch(heartbeat, Activity(process.pid), finds_stopped, finds_stuck)
        loads = (
            partial(memory_sentence, config, available_memory())
            if module == "worker" and loads_weights(config)
            else None
        )
        child = Child(
            name, process, heartbeat, watch, Link(ours, ToSupervisor), replica, model, loads=loads
        )
        child.tell(status)
        start_thread(
            child.follow, self.news, self.show_log, name=f"link of the {child.label} process"
        )
        return child

    def kill(self, children: list[Child]) -> None:
        """At once: a scheduler that is only asked to end would announce that its replica drains."""
        for child in children:
            child.is_ending = True
            child.process.kill()
            child.heartbeat.close()
        self.ending += children


def end_all(children: list[Child]) -> None:
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


def environment(module: str) -> dict[str, str]:
    """Children import radixrt from the path of this process. Variables that the user has set are
    not changed."""
    package_parent = str(Path(__file__).parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {**SHORT_SPINS, **FEW_HEAPS, **({} if module == "worker" else ONE_BLAS_THREAD)}
    return {**ours, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
