"""The link between the supervisor and each of its processes: a pair of sockets.

The supervisor alone knows which processes live. It tells all of them whenever that changes, and
they keep it in memory. The end of the link is the death of the other side, however it died.
"""

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from radixrt.base.config import ServerConfig

Received = TypeVar("Received")


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the processes of a model, as the supervisor knows it."""

    model: int = 0
    """Number of the model among those of the server."""
    loads: int = 0
    """Times that the model was loaded, or was tried to be, since the start of the server."""
    is_loaded: bool = True
    """Its processes run, start, or are started again."""
    failure: str = ""
    """Why it is not loaded, if it could not be, or has died too often."""
    engine: int = 0
    """Number of the engine, counted from the start of the server; the ones before it are dead."""
    starts: dict[int, int] = {}
    """Number of the last start of each replica that lives on this machine."""
    drained: list[int] = []
    """Replicas that an admin has drained; they are not started."""
    is_well: bool = True
    """The tokenizer process and a replica are there, and no process of them hangs or misses its
    beats. In an engine that joins an ingress: a replica is, and belongs to it."""
    shutdown_reason: str = ""
    """Why the server ends at once; empty: it does not."""


class ReplicaDrains(msgspec.Struct, frozen=True, tag=True):
    """A scheduler ends, and is not to be started again before a :class:`StartReplica`."""


class StartReplica(msgspec.Struct, frozen=True, tag=True):
    """An admin wants a drained replica to be started. One that runs is left alone."""

    replica: int
    model: int = 0


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """The api process wants a model to be loaded."""

    model: int


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    """The api process wants the processes of a model, which has no open requests, to end."""

    model: int


class AddModel(msgspec.Struct, frozen=True, tag=True):
    """The api process has one more model, which is not loaded; its number is the next."""

    config: ServerConfig


class EnginesJoined(msgspec.Struct, frozen=True, tag=True):
    """The number of engines of other machines that have joined a tokenizer process; of a scheduler,
    whether it has joined an ingress."""

    count: int


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """A process ends, because of a setting, the checkpoint or the machine."""

    reason: str


ToSupervisor = (
    ReplicaDrains | StartReplica | LoadModel | UnloadModel | AddModel | EnginesJoined | CannotStart
)


class Link(Generic[Received]):
    """One end of a link. Each message is a line of JSON.

    >>> one, other = socket.socketpair()
    >>> supervisor, process = Link(one, ToSupervisor), Link(other, ServerStatus)
    >>> process.send(StartReplica(1))
    True
    >>> process.close()
    >>> list(supervisor.messages())
    [StartReplica(replica=1, model=0)]
    >>> supervisor.close()
    """

    def __init__(self, end: socket.socket, received: type[Received] | object) -> None:
        self._end = end
        self._decoder = msgspec.json.Decoder(received)  # type: ignore[call-overload]

    def send(self, message: msgspec.Struct) -> bool:
        """Send without waiting; False: the other side has not read hundreds of messages. A message
        to a process that is gone is dropped."""
        line = msgspec.json.encode(message) + b"\n"
        try:
            return self._end.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(line)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def messages(self) -> Iterator[Received]:
        """Yield what arrives until the other side is gone."""
        with contextlib.suppress(ConnectionResetError), self._end.makefile("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield self._decoder.decode(line)

    def close(self) -> None:
        self._end.close()


class SupervisorLink:
    """A process's knowledge of the others.

    Args:
        link: to the supervisor; None: there is none.
        model: number of the model whose processes they are.
    """

    def __init__(self, link: Link[ServerStatus] | None = None, model: int = 0) -> None:
        self.model = model
        self.status = ServerStatus()
        self.is_told = threading.Event()
        """The first status has arrived."""
        self._link = link
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], object]] = []
        self._of_others: dict[int, SupervisorLink] = {}

    def of_model(self, model: int) -> "SupervisorLink":
        """The api process's knowledge of the processes of one model, by its number."""
        if model == self.model:
            return self
        with self._lock:
            if model not in self._of_others:
                self._of_others[model] = SupervisorLink(self._link, model)
                self._of_others[model].status = ServerStatus(model=model, is_loaded=False)
            return self._of_others[model]

    def follow(self) -> None:
        """Take what the supervisor tells until it is gone."""
        assert self._link is not None
        for status in self._link.messages():
            self.take(status)

    def take(self, status: ServerStatus) -> None:
        """Make a status known, from any thread."""
        if status.model != self.model and not self.is_told.is_set():
            self.model = status.model  # the first tells the model that the process belongs to
        if status.model != self.model:
            return self.of_model(status.model).take(status)
        self.status = status
        self.is_told.set()
        with self._lock:
            for listener in self._listeners:
                listener()

    def tell(self, message: ToSupervisor) -> None:
        """Send a message to the supervisor."""
        if self._link is not None:
            self._link.send(message)

    async def until(self, condition: Callable[[ServerStatus], bool]) -> ServerStatus:
        """Wait for a status that meets a condition."""
        import asyncio  # which the supervisor starts sooner without

        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        listener = functools.partial(loop.call_soon_threadsafe, changed.set)
        with self._lock:
            self._listeners.append(listener)
        try:
            while not condition(status := self.status):
                await changed.wait()
                changed.clear()
            return status
        finally:
            with self._lock:
                self._listeners.remove(listener)
