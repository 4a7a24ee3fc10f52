"""``--kv-events-format vllm``: what a subscriber of vLLM's events decodes, and what it can
rebuild."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.scheduler.radix.kv_events import EventRecorder, EventStream, VLLMFormat
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.test_kv_events import Publishing, connect, folder, hashes_in

__all__ = ["folder"]


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """As a subscriber declares it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@pytest.fixture
def publishing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publishing]:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    publishing = Publishing(
        folder, kv_events_format="vllm", kv_events_tokens=True, served_model_name="tiny"
    )
    yield publishing
    publishing.publisher.close()


def replay(publishing: Publishing, start: int) -> list[tuple[int, bytes]]:
    """Numbers and payloads, the last one included."""
    with connect(zmq.DEALER, publishing.replays, RCVTIMEO=5000, LINGER=0) as asking:
        asking.send_multipart([b"", struct.pack(">q", start)])
        publishing.answer()
        received = []
        while not received or received[-1][0] >= 0:
            _, number, payload = asking.recv_multipart()
            received.append((struct.unpack(">q", number)[0], payload))
    return received


def decoded(payload: bytes) -> KVEventBatch:
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def test_a_subscriber_gets_topic_number_and_payload(publishing: Publishing) -> None:
    with connect(zmq.SUB, publishing.events) as subscriber:
        token = 0
        while not subscriber.poll(20):  # until it is connected
            publishing.insert([token, token + 1])
            token += 2
        topic, number, payload = subscriber.recv_multipart()
    assert topic == b"kv@10.0.0.7:30000@tiny"
    batch = decoded(payload)
    assert struct.unpack(">q", number)[0] == batch.events[0].token_ids[0] // 2
    assert batch.data_parallel_rank == 0 and batch.ts > 1.7e9


def test_replayed_events_are_the_tree(publishing: Publishing) -> None:
    publishing.insert([1, 2, 3, 4])
    publishing.insert([1, 2, 3, 4, 5, 6])
    publishing.insert([7, 8, 9, 10], salt="secret")
    *batches, (end, nothing) = replay(publishing, 0)
    assert (end, nothing) == (-1, b"") and [number for number, _ in batches] == [0, 1, 2]
    first, second, salted = (decoded(payload).events[0] for _, payload in batches)
    assert (first.token_ids, first.block_size, first.medium) == ([1, 2, 3, 4], 2, "GPU")
    assert first.parent_block_hash is None and first.extra_keys is None
    assert second.token_ids == [5, 6] and second.parent_block_hash == first.block_hashes[-1]
    assert salted.extra_keys is not None and salted.extra_keys[1] is None
    assert "secret" not in str(salted.extra_keys)
    known = {h for event in (first, second, salted) for h in event.block_hashes}
    assert known == {int.from_bytes(h, "big") for h in hashes_in(publishing.tree)}
    assert [number for number, _ in replay(publishing, 2)] == [2, -1]


def test_removed_blocks_and_an_empty_cache_are_told(publishing: Publishing) -> None:
    publishing.insert([1, 2, 3, 4])
    publishing.insert([5, 6])
    publishing.tree.evict(1)
    publishing.publisher.publish()
    publishing.tree.evict(2)
    publishing.publisher.publish()
    events = [decoded(payload).events for number, payload in replay(publishing, 2) if number >= 0]
    stored = {
        h
        for number, payload in replay(publishing, 0)[:2]
        for h in decoded(payload).events[0].block_hashes
    }
    [removed] = events[0]
    assert isinstance(removed, BlockRemoved) and set(removed.block_hashes) < stored
    assert isinstance(events[-1][-1], AllBlocksCleared)


def test_a_request_of_another_length_is_counted(publishing: Publishing) -> None:
    with connect(zmq.DEALER, publishing.replays, LINGER=0) as stranger:
        stranger.send_multipart([b"", b"xyz"])
        publishing.answer()
    assert publishing.publisher._format.malformed_frames == 1


def test_the_format_needs_token_ids() -> None:
    with pytest.raises(ConfigError, match="--kv-events-tokens"):
        ServerConfig(kv_events="ipc:///tmp/x", kv_events_format="vllm").validate()


def test_replicas_need_ports_that_are_far_enough_apart() -> None:
    addresses = {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5559"}
    ServerConfig(dp=2, **addresses).validate()
    with pytest.raises(ConfigError, match="at least 3 apart"):
        ServerConfig(dp=3, **addresses).validate()


def test_states_of_recurrent_layers_are_left_out() -> None:
    """vLLM's events know no states; the own format tells of them."""
    tree, states = RadixTree(page_size=2), KeptStates(num_rows=4, num_pages=8)
    recorder = EventRecorder(8, 2, with_token_ids=True, is_kept=states.is_kept)
    tree.observers, stream = (recorder,), EventStream(recorder)
    states.begin_plan(0)
    states.keep(page=5, saves=2)
    root = tree.lock_root()
    tree.insert(root, np.array([77, 78], dtype=np.int32), np.array([5], dtype=np.int32))
    batch = stream.next_batch()
    assert batch is not None
    own = msgspec.msgpack.decode(batch)["events"]
    assert [event["type"] for event in own] == ["BlockStored", "StatesChanged"]
    *_, payload = VLLMFormat(stream, "kv", 0).message(batch)
    (stored,) = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert isinstance(stored, BlockStored) and stored.token_ids == [77, 78]
