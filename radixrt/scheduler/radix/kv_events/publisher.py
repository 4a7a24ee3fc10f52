"""Publishes KV events on a PUB socket, and answers replay requests on a ROUTER socket.

PUB never waits. For a slow subscriber it queues a bounded number of batches and drops the others. The subscriber sees the
gap in the sequence numbers and requests a replay.
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
from radixrt.scheduler.radix.tree import RadixTree

log = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 1000
"""For each slow subscriber."""

MAX_QUEUED_REPLIES = 2
"""For each client that does not read its replays."""

MAX_REQUEST_BYTES = 1024


class EventPublisher:
    """Sends the batches of an :class:`EventStream`.

    Args:
        address: of the PUB socket; ``tcp://…`` or ``ipc://…``.
        replay_address: of the ROUTER socket; None: no replays.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(self, stream: EventStream, address: str, replay_address: str | None) -> None:
        self.stream = stream
        self._requests: Decoder[ReplayRequest] = Decoder(ReplayRequest)
        self._events = _bind(zmq.PUB, "--kv-events", address, MAX_QUEUED_BATCHES)
        self.socket: zmq.Socket | None = None
        """The ROUTER socket; readable when a client requests a replay."""
        if replay_address is not None:
            flag = "--kv-events-replay"
            self.socket = _bind(zmq.ROUTER, flag, replay_address, MAX_QUEUED_REPLIES)

    def publish(self) -> None:
        """Send the changes since the last call, and answer one replay request. Never waits."""
        batch = self.stream.next_batch()
        if batch is not None:
            self._events.send(batch, zmq.NOBLOCK)
        if self.socket is not None:
            self._answer_one(self.socket)

    def _answer_one(self, replays: zmq.Socket) -> None:
        try:
            *envelope, frame = replays.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        request = self._requests.decode(frame)
        if request is not None:
            # ROUTER drops replies to a client that does not read them.
            reply = self.stream.replay(request)
            replays.send_multipart([*envelope, reply], zmq.NOBLOCK, copy=False)

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """The scheduler's stats with the stream's counters."""
        return msgspec.structs.replace(
            stats,
            kv_events=self.stream.num_events,
            kv_event_replays=self.stream.num_replays,
            kv_event_snapshots=self.stream.num_snapshots,
            malformed_frames=stats.malformed_frames + self._requests.malformed_frames,
        )

    def close(self) -> None:
        self._events.close()
        if self.socket is not None:
            self.socket.close()


def start_publisher(config: ServerConfig, tree: RadixTree, num_pages: int) -> EventPublisher | None:
    """Publish the changes of ``tree``, if ``--kv-events`` is set.

    Raises:
        ConfigError: an address cannot be bound.
    """
    if config.kv_events is None:
        return None
    with_token_ids = config.kv_events_tokens
    recorder = EventRecorder(num_pages, tree.page_size, with_token_ids=with_token_ids)
    stream = EventStream(recorder)
    publisher = EventPublisher(stream, config.kv_events, config.kv_events_replay)
    tree.observer = recorder
    return publisher


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
            f"{flag} {address} can't be listened on ({error}): choose a free port and an IP address of this machine, "
            "or a file in a folder that exists."
        ) from error
    log.info("%s listens on %s", flag, socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket
