"""Publishes KV events on a PUB socket, and answers replay requests on a ROUTER socket.

PUB never waits. For a slow subscriber it queues a bounded number of batches and drops the others.
The subscriber sees the gap in the sequence numbers and requests a replay.
"""

import logging

import msgspec
import zmq

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.ipc import Decoder
from radixrt.kv.events import ReplayRequest
from radixrt.messages.stats import SchedulerStats
from radixrt.scheduler.radix.kv_events.recorder import EventRecorder
from radixrt.scheduler.radix.kv_events.stream import EventStream
from radixrt.scheduler.radix.kv_events.vllm_format import VLLMFormat, topic_of
from radixrt.scheduler.radix.tree import RadixTree

log = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 1000
"""Batches that are queued for a slow subscriber."""

MAX_QUEUED_REPLIES = 2
"""Replays that are queued for a client that does not read them."""

MAX_REQUEST_BYTES = 1024


class _OwnFormat:
    """Writes what docs/kv_events.md describes."""

    max_queued_replies = MAX_QUEUED_REPLIES

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._requests: Decoder[ReplayRequest] = Decoder(ReplayRequest)

    @property
    def malformed_frames(self) -> int:
        return self._requests.malformed_frames

    def message(self, batch: bytes) -> list[bytes]:
        return [batch]

    def replies(self, request: bytes) -> list[list[bytes]]:
        decoded = self._requests.decode(request)
        return [] if decoded is None else [[self._stream.replay(decoded)]]


class EventPublisher:
    """Sends the batches of an :class:`EventStream`.

    Args:
        format: in which the batches and replays are written; None: the own one.
        address: of the PUB socket; ``tcp://…`` or ``ipc://…``; None: nobody outside listens.
        replay_address: of the ROUTER socket; None: no replays.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self,
        stream: EventStream,
        address: str | None,
        replay_address: str | None,
        format: VLLMFormat | None = None,
    ) -> None:
        self.stream = stream
        self._format = format or _OwnFormat(stream)
        self._events: zmq.Socket | None = None
        if address is not None:
            self._events = _bind(zmq.PUB, "--kv-events", address, MAX_QUEUED_BATCHES)
        self.socket: zmq.Socket | None = None
        """The ROUTER socket; readable when a client requests a replay."""
        if replay_address is not None:
            flag = "--kv-events-replay"
            self.socket = _bind(zmq.ROUTER, flag, replay_address, self._format.max_queued_replies)

    @property
    def is_public(self) -> bool:
        """Programs outside can listen, or request replays."""
        return self._events is not None or self.socket is not None

    def publish(self) -> bytes | None:
        """Send the changes since the last call, and answer one replay request. Never waits.

        Returns:
            the encoded batch of changes; None: there are none
        """
        batch = self.stream.next_batch()
        if batch is not None and self._events is not None:
            self._events.send_multipart(self._format.message(batch), zmq.NOBLOCK)
        if self.socket is not None:
            self._answer_one(self.socket)
        return batch

    def _answer_one(self, replays: zmq.Socket) -> None:
        try:
            *envelope, frame = replays.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        for reply in self._format.replies(frame):
            # ROUTER drops replies to a client that does not read them.
            replays.send_multipart([*envelope, *reply], zmq.NOBLOCK, copy=False)

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """The scheduler's stats with the stream's counters."""
        return msgspec.structs.replace(
            stats,
            kv_events=self.stream.num_events,
            kv_event_replays=self.stream.num_replays,
            kv_event_snapshots=self.stream.num_snapshots,
            malformed_frames=stats.malformed_frames + self._format.malformed_frames,
        )

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self.socket is not None:
            self.socket.close()


def start_publisher(
    config: ServerConfig, tree: RadixTree, num_pages: int, replica: int = 0
) -> EventPublisher | None:
    """Publish the changes of ``tree``, if ``--kv-events`` is set, or the engine is one of several
    replicas.

    Raises:
        ConfigError: an address cannot be bound.
    """
    if config.kv_events is None and not config.is_routed:
        return None
    with_token_ids = config.kv_events_tokens
    recorder = EventRecorder(num_pages, tree.page_size, with_token_ids=with_token_ids)
    stream = EventStream(recorder)
    publisher = EventPublisher(
        stream,
        _address_of(config.kv_events, replica),
        _address_of(config.kv_events_replay, replica),
        VLLMFormat(stream, topic_of(config), replica)
        if config.kv_events_format == "vllm"
        else None,
    )
    tree.observer = recorder
    return publisher


def _address_of(address: str | None, replica: int) -> str | None:
    """The address of a replica: the next port for each, or a file of its own.

    >>> _address_of("tcp://127.0.0.1:5557", 1), _address_of("ipc:///run/events", 1)
    ('tcp://127.0.0.1:5558', 'ipc:///run/events.1')
    """
    if address is None or replica == 0:
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + replica}" if port.isdigit() else f"{address}.{replica}"


def _bind(kind: int, flag: str, address: str, max_queued: int) -> zmq.Socket:
    socket: zmq.Socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"{flag}: cannot listen on {address} ({error}): choose a free port and an IP address of this machine, "
            "or a file in a folder that exists."
        ) from error
    log.info("%s listens on %s", flag, socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket
