"""Typed one-way channels between processes: ZeroMQ sockets that carry msgspec messages.

A link between two processes is two channels, one in each direction. The receiver binds. Addresses
(:mod:`radixrt.base.channels`) are ``ipc://`` files in a directory that only this user can enter;
:mod:`radixrt.joining` has the links between machines. Nothing is ever unpickled.
"""

import logging
import math
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

from radixrt.base.errors import RadixrtError

log = logging.getLogger(__name__)

Received = TypeVar("Received")

LONGEST_WAIT_S = 1.0
"""Seconds after which a waiting process writes a heartbeat."""

LINGER_MS = 500
"""Time for which a process that ends waits until its last messages have left."""

MAX_FRAME_BYTES = 512 << 20
"""A larger frame is an error of the sender; ZeroMQ drops the connection."""


class FrameTooLargeError(RadixrtError):
    """A message has more than MAX_FRAME_BYTES."""


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
    """Close all channels of this process that have no event loop; returns when their messages have
    left, or after LINGER_MS."""
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

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message arrives or the time is over (LONGEST_WAIT_S at most)."""
        self.socket.poll(math.ceil(min(timeout_s, LONGEST_WAIT_S) * 1000))

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
        """Raises FrameTooLargeError if the message exceeds the receiver's limit."""
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
        """Sleep until a message arrives or the time is over (LONGEST_WAIT_S at most); True if one
        has arrived."""
        timeout_s = LONGEST_WAIT_S if timeout_s is None else min(timeout_s, LONGEST_WAIT_S)
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))


class AsyncInbox(Decoder[Received]):
    """The receiving end of a channel, for a process with an event loop."""

    def __init__(self, address: str, message_types: type[Received] | object) -> None:
        from zmq.asyncio import Context  # with asyncio, which other processes do not need

        super().__init__(message_types)
        self.socket = _bind(Context.instance(), address)

    async def receive(self) -> Received:
        """Wait for the next well-formed message."""
        while (message := self.decode(await self.socket.recv())) is None:  # type: ignore[misc]
            pass
        return message

    def close(self) -> None:
        self.socket.close()
