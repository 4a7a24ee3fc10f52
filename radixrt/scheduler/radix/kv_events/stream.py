"""Numbers the batches of events, and replays the last ones to subscribers that missed them.

The last batches are kept as they were sent. A subscriber that lacks older ones, is new or comes
from another start of the engine gets a snapshot, of 8 bytes per block.
"""

import secrets
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from radixrt.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    ReplayRequest,
)
from radixrt.scheduler.radix.kv_events.recorder import EventRecorder

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
        self.last_events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared] = ()
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
