"""Mirrors the cached blocks of one replica by its KV events.

Batches have consecutive numbers. After a gap the mirror stays as it is until the missing batches,
or a snapshot, arrive. A batch of another stream is of an engine that was started again, with an
empty cache.
"""

import numpy as np

from radixrt.kv.events import (
    AllBlocks,
    AllBlocksCleared,
    AnyEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ReplayRequest,
    StatesChanged,
)

BlockHash = int
"""The 8 bytes of a block hash as a number."""


def unpack_hashes(packed: bytes) -> list[BlockHash]:
    """Packed block hashes as numbers: [len(packed) // 8].

    >>> unpack_hashes(bytes(8) + b"\\x01" + bytes(7))
    [0, 1]
    """
    return np.frombuffer(packed, dtype="<u8").tolist()


class CacheMirror:
    """The set of block hashes in the cache of one replica, and of those with a state of recurrent
    layers."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The replica has died, and its cache with it."""
        self.hashes: set[BlockHash] = set()
        self.states: set[BlockHash] = set()
        self._stream = ""
        self._next = 1
        """Number of the next batch."""
        self._latest = 0
        """Number of the last batch that the replica is known to have published."""

    def apply(self, batch: EventBatch) -> None:
        """Take a batch, in any order and any number of times."""
        self.heard_of(batch.stream, batch.sequence)
        is_snapshot = any(isinstance(event, AllBlocks) for event in batch.events)
        if batch.sequence != self._next and not (is_snapshot and batch.sequence >= self._next - 1):
            return  # known already, or after a gap
        self._next = batch.sequence + 1
        for event in batch.events:
            self._apply(event)

    def heard_of(self, stream: str, sequence: int) -> None:
        """A heartbeat: the replica has published the batches of ``stream`` up to ``sequence``."""
        if stream != self._stream:
            self.forget()
            self._stream = stream
        self._latest = max(self._latest, sequence)

    def missing(self) -> ReplayRequest | None:
        """The request for the batches that are missing; None if none is known to be."""
        if self._latest < self._next:
            return None
        return ReplayRequest(stream=self._stream, sequence=self._next)

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case BlockStored():
                self.hashes.update(unpack_hashes(event.block_hashes))
            case BlockRemoved():
                removed = unpack_hashes(event.block_hashes)
                self.hashes.difference_update(removed)
                self.states.difference_update(removed)
            case StatesChanged():
                self.states.difference_update(unpack_hashes(event.dropped))
                self.states.update(unpack_hashes(event.kept))
            case AllBlocksCleared():
                self.hashes.clear()
                self.states.clear()
            case AllBlocks():
                self.hashes = set(unpack_hashes(event.block_hashes))
                self.states = set(unpack_hashes(event.states))
