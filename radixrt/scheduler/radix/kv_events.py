"""Tells routers outside which blocks of KV this engine holds: docs/internals/kv_events.md.

The tree's changes become events with block hashes (:class:`EventRecorder`), numbered batches of
them are kept for replays (:class:`EventStream`), and a PUB socket publishes them
(:class:`EventPublisher`), in the own format or in vLLM's. PUB never waits. For a slow subscriber it
queues a bounded number of batches and drops the others. The subscriber sees the gap in the sequence
numbers and requests a replay, on a ROUTER socket.
"""

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.ipc import Decoder
from radixrt.kv.events import (
    AllBlocks,
    AllBlocksCleared,
    AnyEvent,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    ReplayRequest,
    StatesChanged,
    block_hashes,
    namespace_hash,
)
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.messages.stats import SchedulerStats
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.tree import RadixTree

_ABSENT = -1


class _Stored(NamedTuple):
    """The arguments of :meth:`EventRecorder.stored`."""

    root: CacheRoot | None
    previous_page: int | None
    tokens: TokenIds
    pages: Pages


class EventRecorder:
    """The tree's observer. It notes the changes, and computes hashes when the events are taken,
    while the worker computes its next step.

    Args:
        with_token_ids: whether the events contain the blocks' token ids.
        is_kept: whether each page has a state of recurrent layers (:class:`KeptStates`); None: the
            model has no such layers.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        with_token_ids: bool,
        is_kept: NDArray[np.bool_] | None = None,
    ) -> None:
        self._page_size = page_size
        self._with_token_ids = with_token_ids
        self._changes: list[_Stored | Pages] = []
        self._hashes = np.zeros(num_pages, dtype=np.uint64)  # 8 bytes each, never used as numbers
        self._kind = np.full(num_pages, _ABSENT, dtype=np.int32)
        """Of each page: a number of :attr:`_kinds`."""
        self._kinds: list[tuple[bool, str]] = []
        """Whether the root has a tenant or a salt, and its adapter."""
        self._num_cached = 0
        self._is_kept = is_kept
        self._with_state = np.zeros(num_pages, dtype=np.bool_)
        """The pages whose states are published."""

    def stored(
        self, root: CacheRoot | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        self._changes.append(_Stored(root, previous_page, tokens, pages))

    def removed(self, pages: Pages) -> None:
        self._changes.append(pages)

    def take_events(self) -> list[AnyEvent]:
        """The events since the last call, in order."""
        changes, self._changes = self._changes, []
        events: list[AnyEvent] = [
            self._store(change) if isinstance(change, _Stored) else self._remove(change)
            for change in changes
        ]
        if self._is_kept is not None:
            events += self._changed_states(self._is_kept & (self._kind != _ABSENT))
        return events

    def _changed_states(self, now: NDArray[np.bool_]) -> list[StatesChanged]:
        """The change to these pages with states, if there is one."""
        before, self._with_state = self._with_state, now
        kept, dropped = (self._hashes[pages] for pages in (now & ~before, before & ~now))
        if not len(kept) and not len(dropped):
            return []
        return [StatesChanged(kept=kept.tobytes(), dropped=dropped.tobytes())]

    def snapshot(self) -> AllBlocks:
        """All blocks of the tree, as of the last events taken."""
        cached, states = self._hashes[self._kind != _ABSENT], self._hashes[self._with_state]
        return AllBlocks(
            block_hashes=cached.tobytes(), page_size=self._page_size, states=states.tobytes()
        )

    def _store(self, change: _Stored) -> BlockStored:
        previous, packed = change.previous_page, change.tokens.tobytes()
        if previous is None:
            root = change.root or BASE_ROOT
            parent, before = None, namespace_hash(root)
            kind = self._number_of((bool(root.tenant or root.salt), root.adapter))
        else:
            parent = before = self._hashes[previous].tobytes()
            kind = int(self._kind[previous])
        hashes = block_hashes(before, packed, self._page_size)
        self._hashes[change.pages] = np.frombuffer(hashes, dtype=np.uint64)
        self._kind[change.pages] = kind
        self._num_cached += len(change.pages)
        return BlockStored(
            block_hashes=hashes,
            parent_hash=parent,
            token_ids=packed if self._with_token_ids else None,
            page_size=self._page_size,
            salted=self._kinds[kind][0],
            adapter=self._kinds[kind][1],
        )

    def _number_of(self, kind: tuple[bool, str]) -> int:
        if kind not in self._kinds:
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def _remove(self, pages: Pages) -> BlockRemoved | AllBlocksCleared:
        self._kind[pages] = _ABSENT
        self._with_state[pages] = False
        self._num_cached -= len(pages)
        if self._num_cached == 0:
            return AllBlocksCleared()  # the same in fewer bytes
        return BlockRemoved(block_hashes=self._hashes[pages].tobytes())


MAX_BATCHES = 10_000
"""Kept for replays."""

MAX_BUFFER_BYTES = 32 << 20
"""Bytes of all kept batches. A replay is one message, which the scheduler sends between two
steps."""


class EventStream:
    """Numbers the batches of one recorder and keeps the last ``max_batches``."""

    def __init__(self, recorder: EventRecorder, max_batches: int = MAX_BATCHES) -> None:
        self._recorder = recorder
        self.max_batches = max_batches
        self.name = secrets.token_hex(8)
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self.num_batches = 0
        """Published; also the number of the last one."""
        self.last_events: Sequence[AnyEvent] = ()
        self.last_time = 0.0
        """The events of the last batch, and the Unix time of its publication."""
        self.num_events = 0
        self.num_replays = 0
        self.num_snapshots = 0

    def next_batch(self) -> bytes | None:
        """The changes since the last call, encoded; None if there are none."""
        events = self._recorder.take_events()
        if not events:
            return None
        self.num_batches += 1
        self.num_events += len(events)
        self.last_events, self.last_time = events, time.time()
        frame = self._encode(*events)
        self._keep(frame)
        return frame

    def replay(self, request: ReplayRequest) -> bytes:
        """The answer to a replay request: a msgpack list of batches. Call it right after
        :meth:`next_batch`."""
        frames = self._batches_from(request)
        if frames is None:
            self.num_snapshots += 1
            frames = [self._encode(self._recorder.snapshot())]
        else:
            self.num_replays += 1
        return self._encoder.encode([msgspec.Raw(frame) for frame in frames])

    def _batches_from(self, request: ReplayRequest) -> list[bytes] | None:
        """The batches that a subscriber lacks; None if they are not kept."""
        num_missing = self.num_batches + 1 - request.sequence
        if request.stream != self.name or not 0 <= num_missing <= len(self._kept):
            return None
        return [self._kept[index] for index in range(-num_missing, 0)]

    def _encode(self, *events: Event) -> bytes:
        batch = EventBatch(
            stream=self.name,
            sequence=self.num_batches,
            timestamp=time.time(),
            events=list(events),  # type: ignore[arg-type]
        )
        return self._encoder.encode(batch)

    def _keep(self, frame: bytes) -> None:
        self._kept.append(frame)
        self._kept_bytes += len(frame)
        while len(self._kept) > self.max_batches or self._kept_bytes > MAX_BUFFER_BYTES:
            self._kept_bytes -= len(self._kept.popleft())


MEDIUM = "GPU"
"""vLLM's name for the pool, whatever the device."""

_END = (-1).to_bytes(8, "big", signed=True)


class VLLMFormat:
    """Numbers and writes the batches of a stream in vLLM's format, and keeps the last ones for
    replays.

    Args:
        topic: the first frame; subscribers filter by its beginning.
    """

    max_queued_replies = MAX_BATCHES + 2

    def __init__(self, stream: EventStream, topic: str, rank: int) -> None:
        self._stream, self._topic, self._rank = stream, topic.encode(), rank
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self.malformed_frames = 0

    def message(self, batch: bytes) -> list[bytes]:
        """The frames of the stream's last batch."""
        events = [
            vllm_event(event)
            for event in self._stream.last_events
            if not isinstance(event, StatesChanged)  # vLLM's stream says nothing of states
        ]
        payload = msgspec.msgpack.encode([self._stream.last_time, events, self._rank])
        number = (self._stream.num_batches - 1).to_bytes(8, "big")
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > MAX_BATCHES or self._kept_bytes > MAX_BUFFER_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        return [self._topic, number, payload]

    def replies(self, request: bytes) -> list[list[bytes]]:
        """The messages that answer a replay request."""
        if len(request) != 8:
            self.malformed_frames += 1
            return []
        self._stream.num_replays += 1
        return [*([n, payload] for n, payload in self._kept if n >= request), [_END, b""]]


def topic_of(config: ServerConfig) -> str:
    """``kv@ADDRESS:PORT@MODEL``, as llm-d names its pods; the address is $POD_IP, or else
    ``--host``."""
    return f"kv@{os.environ.get('POD_IP', config.host)}:{config.port}@{config.model_name}"


def vllm_event(event: AnyEvent) -> list[Any]:
    """An event as an array.

    The blocks of a prompt with a cache salt have an extra key, so that nobody takes them for blocks
    without one. vLLM publishes the salt itself; here it is the hash of the first block, since a
    salt is a secret. The name of the adapter is its digest.
    """
    match event:
        case BlockStored(token_ids=packed) if packed is not None:
            hashes = _hashes(event.block_hashes)
            parent = None if event.parent_hash is None else _hashes(event.parent_hash)[0]
            extra_keys: list[list[str] | None] | None = None
            if event.salted and parent is None:
                extra_keys = [[event.block_hashes[:8].hex()], *[None] * (len(hashes) - 1)]
            tokens = unpack_ids(packed).tolist()
            lora_id, lora_name = None, event.adapter or None
            return [
                "BlockStored",
                hashes,
                parent,
                tokens,
                event.page_size,
                lora_id,
                MEDIUM,
                lora_name,
                extra_keys,
            ]
        case BlockRemoved():
            return ["BlockRemoved", _hashes(event.block_hashes), MEDIUM]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]
    raise ValueError(f"vLLM's format has no {type(event).__name__} like this.")


def _hashes(packed: bytes) -> list[int]:
    """Unsigned numbers of 64 bits."""
    return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]


log = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 1000
"""Batches that are queued for a slow subscriber."""

MAX_QUEUED_REPLIES = 2
"""Replays that are queued for a client that does not read them."""

MAX_REQUEST_BYTES = 1024


class _OwnFormat:
    """Writes what docs/internals/kv_events.md describes."""

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
    config: ServerConfig,
    tree: RadixTree,
    num_pages: int,
    replica: int = 0,
    states: KeptStates | None = None,
) -> EventPublisher | None:
    """Publish the changes of ``tree``, and of the states behind its pages, if ``--kv-events`` is set, or the engine is one of several
    replicas.

    Raises:
        ConfigError: an address cannot be bound.
    """
    if config.kv_events is None and not config.is_routed:
        return None
    with_token_ids = config.kv_events_tokens
    is_kept = states.is_kept if states else None
    recorder = EventRecorder(
        num_pages, tree.page_size, with_token_ids=with_token_ids, is_kept=is_kept
    )
    stream = EventStream(recorder)
    publisher = EventPublisher(
        stream,
        _address_of(config.kv_events, replica),
        _address_of(config.kv_events_replay, replica),
        VLLMFormat(stream, topic_of(config), replica)
        if config.kv_events_format == "vllm"
        else None,
    )
    tree.observers += (recorder,)
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
