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

Received = TypeVar("Received")


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the server's processes, as the supervisor knows it."""

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


class EnginesJoined(msgspec.Struct, frozen=True, tag=True):
    """The number of engines of other machines that have joined a tokenizer process; of a scheduler,
    whether it has joined an ingress."""

    count: int


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """A process ends, because of a setting, the checkpoint or the machine."""

    reason: str


ToSupervisor = ReplicaDrains | StartReplica | EnginesJoined | CannotStart


class Link(Generic[Received]):
    """One end of a link. Each message is a line of JSON.

    >>> one, other = socket.socketpair()
    >>> supervisor, process = Link(one, ToSupervisor), Link(other, ServerStatus)
    >>> process.send(StartReplica(1))
    True
    >>> process.close()
    >>> list(supervisor.messages())
    [StartReplica(replica=1)]
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
    """

    def __init__(self, link: Link[ServerStatus] | None = None) -> None:
        self.status = ServerStatus()
        self.is_told = threading.Event()
        """The first status has arrived."""
        self._link = link
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], object]] = []

    def follow(self) -> None:
        """Take what the supervisor tells until it is gone."""
        assert self._link is not None
        for status in self._link.messages():
            self.take(status)

    def take(self, status: ServerStatus) -> None:
        """Make a status known, from any thread."""
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
