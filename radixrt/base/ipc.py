"""Typed one-way channels between processes: ZeroMQ sockets that carry msgspec messages.

A link between two processes is two channels, one in each direction. The receiver binds. Addresses are ``ipc://`` files in
a directory that only this user can enter; :mod:`radixrt.joining` has the links between machines. Nothing is ever unpickled.
"""

import logging
import math
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from radixrt.base.errors import ConfigError, RadixrtError

log = logging.getLogger(__name__)

Received = TypeVar("Received")

LONGEST_WAIT_S = 1.0
"""Seconds after which a waiting process writes a heartbeat."""

LONGEST_RUN_DIR = 76
"""Characters; a Unix socket's whole path may have 107 (on macOS 103)."""

LINGER_MS = 500
"""For which a process that ends waits until its last messages have left."""

MAX_FRAME_BYTES = 512 << 20
"""A larger frame is an error of the sender; ZeroMQ drops the connection."""


class FrameTooLargeError(RadixrtError):
    """A message has more than MAX_FRAME_BYTES."""


class Channels:
    """The addresses of a server's channels, as files in its run directory.

    Each engine that the supervisor starts has a folder of its own there, so that nothing of a dead engine reaches the next. It is the
    tokenizer process's. So has each start of a replica, a scheduler with its workers, which can outlive the engine: it then belongs to
    the next one. Only the api process's inbox is the same for all engines.
    """

    def __init__(
        self, run_dir: Path, engine: int = 0, replica: int | None = None, start: int = 0
    ) -> None:
        """
        Args:
            engine: number of the engine, counted from the start of the server.
            replica: number of the replica whose scheduler and workers use the channels; None: those of api and tokenizer process.
            start: number of the replica's start, counted from the start of the server.
        """
        self.run_dir = run_dir
        self.engine = engine
        self.replica = replica
        self.start = start

    @staticmethod
    def make_run_dir() -> Path:
        """A fresh directory, mode 0700.

        Raises:
            ConfigError: its path is too long for a socket's address.
        """
        run_dir = Path(tempfile.mkdtemp(prefix="radixrt-"))
        if len(str(run_dir)) > LONGEST_RUN_DIR:
            run_dir.rmdir()
            raise ConfigError(
                f"The path of {run_dir} is too long for Unix sockets: set TMPDIR to a shorter one."
            )
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        Channels(run_dir).folder.mkdir(mode=0o700)
        return run_dir

    @property
    def folder(self) -> Path:
        """The files of this engine, or of this start of a replica; removed at its death."""
        name = str(self.engine) if self.replica is None else f"{self.replica}.{self.start}"
        return self.run_dir / name

    @property
    def is_alive(self) -> bool:
        """The supervisor has not noticed the death of this engine, or replica."""
        return self.folder.is_dir()

    @property
    def drained_file(self) -> Path:
        """While it is there, this replica is not started: an admin has drained it."""
        return self.run_dir / f"drained-{self.replica}"

    @property
    def tokenizer_file(self) -> Path:
        """The model's tokenizer.json, written by the tokenizer process for the processes that load grammars."""
        return self.run_dir / "tokenizer.json"

    @property
    def joined_file(self) -> Path:
        """Exists while the scheduler of these channels belongs to an ingress on another machine."""
        return self.folder / "joined"

    @property
    def farewell_file(self) -> Path:
        """Where the supervisor leaves the reason for the end of the server before it ends the api process."""
        return self.run_dir / "farewell"

    def heartbeat_file(self, process: str) -> Path:
        """The record of a process; see :mod:`radixrt.base.heartbeat`."""
        return self.folder / f"heartbeat-{process}"

    def heartbeat_files(self) -> list[Path]:
        """The records of this engine's processes, or of this replica's; none if it is not there."""
        return list(self.folder.glob("heartbeat-*"))

    def of_replica(self, replica: int, start: int) -> "Channels":
        """The channels of a start of a replica of this engine."""
        return Channels(self.run_dir, self.engine, replica, start)

    def replicas(self) -> list["Channels"]:
        """Those of the replicas that live."""
        names = [path.name.split(".") for path in self.run_dir.glob("[0-9]*.[0-9]*")]
        return [self.of_replica(int(replica), int(start)) for replica, start in names]

    def address(self, sender: str, receiver: str) -> str:
        """For example ``ipc:///tmp/radixrt-x/0/api-tokenizer``. A replica has other addresses for each tokenizer process:
        ``ipc:///tmp/radixrt-x/1/scheduler-tokenizer.0.3``, ``ipc:///tmp/radixrt-x/0.3/tokenizer-scheduler.1``."""
        number = ""
        if receiver == "api":
            folder = self.run_dir
        elif receiver == "tokenizer":
            folder = self.run_dir / str(self.engine)
            number = "" if self.replica is None else f".{self.replica}.{self.start}"
        else:
            folder = self.folder
            number = f".{self.engine}"
        return f"ipc://{folder}/{sender}-{receiver}{number}"

    @property
    def attach_address(self) -> str:
        """At which a replica hears of the tokenizer process of the next engine."""
        return f"ipc://{self.folder}/attach"

    def next_engine(self) -> None:
        """Let further addresses be those of the next engine, and remove the files of this one. Replicas keep theirs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.engine += 1
        self.folder.mkdir(mode=0o700)


class Decoder(Generic[Received]):
    """Decodes frames into messages; drops, counts and logs malformed ones."""

    def __init__(self, message_types: type[Received] | object) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_types)  # type: ignore[call-overload]
        self.malformed_frames = 0

    def decode(self, frame: bytes) -> Received | None:
        try:
            return self._decoder.decode(frame)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.malformed_frames += 1
            log.warning("Dropped a malformed frame of %d bytes: %s", len(frame), error)
            return None


def _bind(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.bind(address)
    return socket


def _connect(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)  # queues are bounded by --max-queued-requests, not here
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds: the other side may still be starting
    socket.connect(address)
    return socket


def close_all() -> None:
    """Close all channels of this process that have no event loop; returns when their messages have left, or after LINGER_MS."""
    zmq.Context.instance().destroy(LINGER_MS)


class Inbox(Decoder[Received]):
    """The receiving end of a channel, for a process with a plain loop."""

    def __init__(self, address: str, message_types: type[Received] | object) -> None:
        super().__init__(message_types)
        self.socket = _bind(zmq.Context.instance(), address)
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * LONGEST_WAIT_S))

    def receive(self, meanwhile: Callable[[], None] = lambda: None) -> Received:
        """Wait for the next well-formed message.

        Args:
            meanwhile: called every LONGEST_WAIT_S seconds without a message.
        """
        while True:
            try:
                frame = self.socket.recv()
            except zmq.Again:
                meanwhile()
                continue
            if (message := self.decode(frame)) is not None:
                return message

    def receive_now(self) -> Received | None:
        """The next well-formed message if one has arrived; otherwise None."""
        try:
            while (message := self.decode(self.socket.recv(zmq.NOBLOCK))) is None:
                pass
        except zmq.Again:
            return None
        return message

    def receive_waiting(self) -> list[Received]:
        """All messages that have arrived, without waiting."""
        return list(iter(self.receive_now, None))

    def close(self) -> None:
        self.socket.close()


def encode(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytes:
    """A message as a frame.

    Raises:
        FrameTooLargeError: it exceeds the receiver's limit.
    """
    frame = encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(
            f"A message of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}."
        )
    return frame


class Outbox:
    """The sending end of a channel. Sending never waits."""

    def __init__(self, address: str) -> None:
        self.socket = _connect(zmq.Context.instance(), address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Raises:
        FrameTooLargeError: the message exceeds the receiver's limit.
        """
        self.socket.send(encode(self._encoder, message), copy=False)

    def close(self) -> None:
        self.socket.close()


class Poller:
    """Waits for several inboxes at once."""

    def __init__(self, *inboxes: Inbox) -> None:
        self._poller = zmq.Poller()
        for inbox in inboxes:
            self._poller.register(inbox.socket, zmq.POLLIN)

    def add(self, socket: zmq.Socket) -> None:
        """Also wait for messages on a raw socket."""
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: zmq.Socket) -> None:
        """Do not wait for messages on a socket any more."""
        self._poller.unregister(socket)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until a message arrives or the time is over (LONGEST_WAIT_S at most); True if one has arrived."""
        timeout_s = LONGEST_WAIT_S if timeout_s is None else min(timeout_s, LONGEST_WAIT_S)
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))


class AsyncInbox(Decoder[Received]):
    """The receiving end of a channel, for a process with an event loop."""

    def __init__(self, address: str, message_types: type[Received] | object) -> None:
        super().__init__(message_types)
        self.socket = _bind(zmq.asyncio.Context.instance(), address)

    async def receive(self) -> Received:
        """Wait for the next well-formed message."""
        while (message := self.decode(await self.socket.recv())) is None:  # type: ignore[misc]
            pass
        return message

    def close(self) -> None:
        self.socket.close()
