"""Writes KV events in vLLM's wire format, for routers that read that (llm-d, Dynamo).

A message has three frames: a topic, the number of the batch (8 bytes, big-endian, from 0), and
msgpack ``[time, [event, ...], data parallel rank]``. Events are arrays that begin with their tag,
as vLLM wrote them until June 2026; readers of the maps of later versions read both
(llm-d-kv-cache#661). A replay request is a number in 8 bytes. It is answered with a message for
each kept batch from there on and a last one with number -1. The format has no snapshot.
"""

import os
from collections import deque
from typing import Any

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.kv.events import AllBlocks, AllBlocksCleared, BlockRemoved, BlockStored
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.radix.kv_events.stream import MAX_BATCHES, MAX_BUFFER_BYTES, EventStream

MEDIUM = "GPU"
"""vLLM's name for the pool, whatever the device."""

_END = (-1).to_bytes(8, "big", signed=True)


class VLLMFormat:
    """Numbers and writes the batches of a stream in vLLM's format, and keeps the last ones for
    replays.

    Args:
        topic: the first frame; subscribers filter by its beginning.
        rank: number of the replica.
    """

    max_queued_replies = MAX_BATCHES + 2

    def __init__(self, stream: EventStream, topic: str, rank: int) -> None:
        self._stream, self._topic, self._rank = stream, topic.encode(), rank
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self.malformed_frames = 0

    def message(self, batch: bytes) -> list[bytes]:
        """The frames of the stream's last batch."""
        events = list(map(vllm_event, self._stream.last_events))
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


def vllm_event(event: BlockStored | BlockRemoved | AllBlocksCleared | AllBlocks) -> list[Any]:
    """An event as an array.

    The blocks of a prompt with a cache salt have an extra key, so that nobody takes them for blocks
    without one. vLLM publishes the salt itself; here it is the hash of the first block, since a
    salt is a secret.
    """
    match event:
        case BlockStored(token_ids=packed) if packed is not None:
            hashes = _hashes(event.block_hashes)
            parent = None if event.parent_hash is None else _hashes(event.parent_hash)[0]
            extra_keys: list[list[str] | None] | None = None
            if event.salted and parent is None:
                extra_keys = [[event.block_hashes[:8].hex()], *[None] * (len(hashes) - 1)]
            tokens = unpack_ids(packed).tolist()
            lora_id = lora_name = None
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
