"""The router's mirror of a replica's cache is the replica's tree, whatever is lost, repeated or
restarted."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from radixrt.kv.events import AllBlocks, BlockStored, EventBatch
from radixrt.router.mirror import CacheMirror, unpack_hashes
from radixrt.router.router import Router
from radixrt.scheduler.radix.kv_events import EventRecorder, EventStream
from tests.scheduler.engine_model import EngineModel, limits
from tests.scheduler.test_kv_events import LossyEvents, MirrorMachine, Replays


class Subscriber:
    """Feeds a :class:`CacheMirror` as the documented subscriber is fed: batches, and heartbeats in
    a silence."""

    def __init__(self, events: LossyEvents, replays: Replays) -> None:
        self.events, self.replays = events, replays
        self.mirror = CacheMirror()

    def update(self) -> None:
        if self.events.poll(0):
            self.mirror.apply(msgspec.msgpack.decode(self.events.recv(), type=EventBatch))
        else:
            self.mirror.heard_of(self.replays.stream.name, self.replays.stream.num_batches)
        if (missing := self.mirror.missing()) is not None:
            self.replays.send(msgspec.msgpack.encode(missing))
            for batch in msgspec.msgpack.decode(self.replays.recv(), type=list[EventBatch]):
                self.mirror.apply(batch)

    @property
    def hashes(self) -> set[bytes]:
        return {number.to_bytes(8, "little") for number in self.mirror.hashes}

    @property
    def stream(self) -> str:
        return self.mirror._stream

    @property
    def next(self) -> int:
        return self.mirror._next


class RouterMirrorMachine(MirrorMachine):
    """The machine of the documented subscriber, with batches that also come twice."""

    subscriber = Subscriber

    @rule()
    def repeat(self) -> None:
        if self.events.frames:
            self.events.frames.appendleft(self.events.frames[0])


TestMirror = RouterMirrorMachine.TestCase
TestMirror.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


REPORTS = [0.1] * 7 + [1.0] * 3
"""Seconds between reports: after the steps of a request, then once a second."""


@pytest.mark.parametrize("kept_states", [0, 9])
def test_an_index_that_loses_one_report_in_twenty_is_the_snapshot_within_two_seconds(
    kept_states: int,
) -> None:
    """Answers to its requests get lost as well; the replica is also started again, at the same
    address."""
    random, num_states = np.random.default_rng(5), 0
    router, tree_hashes = Router(page_size=4), set[int]()
    router.join(0, has_states=kept_states > 0)
    num_lost, now, equal_at, longest_s = 0, 0.0, 0.0, 0.0
    for number in range(400):
        if number % 100 == 0:
            bounds = limits(context_length=96, kept_states=kept_states, state_interval=16)
            engine = EngineModel(bounds, has_states=kept_states > 0)
            is_kept = engine.scheduler.state.kv.states.is_kept if kept_states else None
            recorder = EventRecorder(64, 4, with_token_ids=False, is_kept=is_kept)
            engine.scheduler.state.kv.tree.observers = (recorder,)
            stream = EventStream(recorder, max_batches=8)
        engine.add(random.integers(0, 4, random.integers(20, 60)).tolist(), 4)
        for pause_s in REPORTS:
            now += pause_s
            if engine.plan() is not None:
                engine.absorb()
            batch = stream.next_batch()
            if random.random() < 0.05:
                num_lost += 1
            else:
                router.take_events(0, [batch] if batch else [])
                missing = router.heartbeat(0, stream.name, stream.num_batches)
                if missing is not None and random.random() >= 0.05:
                    replayed = msgspec.msgpack.decode(
                        stream.replay(missing), type=list[msgspec.Raw]
                    )
                    router.take_events(0, map(bytes, replayed))
            snapshot, mirror = recorder.snapshot(), router._replicas[0].mirror
            tree_hashes, states = map(set, map(unpack_hashes, (snapshot.block_hashes, snapshot.states)))  # fmt: skip
            num_states = max(num_states, len(states))
            if (mirror.hashes, mirror.states) == (tree_hashes, states):
                equal_at = now
            longest_s = max(longest_s, now - equal_at)
    assert num_lost > 150 and tree_hashes and num_states == kept_states
    assert 0 < longest_s <= 2


def stored(*numbers: int) -> BlockStored:
    hashes = b"".join(number.to_bytes(8, "little") for number in numbers)
    return BlockStored(
        block_hashes=hashes, parent_hash=None, token_ids=None, page_size=1, salted=False
    )


def batch(sequence: int, *numbers: int, stream: str = "a") -> EventBatch:
    return EventBatch(stream=stream, sequence=sequence, timestamp=0.0, events=[stored(*numbers)])


def batches() -> Iterator[EventBatch]:
    return (batch(number, number) for number in range(1, 100))


def test_an_engine_that_was_started_again_has_an_empty_cache() -> None:
    mirror = CacheMirror()
    for one in batches():
        mirror.apply(one)
    assert len(mirror.hashes) == 99
    mirror.heard_of("b", 0)
    assert mirror.hashes == set() and mirror.missing() is None
    mirror.apply(batch(1, 7, stream="b"))
    assert mirror.hashes == {7}


def test_a_lost_last_batch_is_missed_at_the_next_heartbeat() -> None:
    mirror = CacheMirror()
    mirror.apply(batch(1, 5))
    assert mirror.missing() is None
    mirror.heard_of("a", 2)
    missing = mirror.missing()
    assert missing is not None and (missing.stream, missing.sequence) == ("a", 2)


def test_a_snapshot_replaces_all() -> None:
    mirror = CacheMirror()
    mirror.apply(batch(1, 5))
    mirror.apply(batch(9, 6))
    assert mirror.hashes == {5}, "after a gap"
    snapshot = AllBlocks(block_hashes=(8).to_bytes(8, "little"), page_size=1)
    mirror.apply(EventBatch(stream="a", sequence=9, timestamp=0.0, events=[snapshot]))
    assert mirror.hashes == {8} and mirror.missing() is None
    mirror.apply(batch(9, 6))
    assert mirror.hashes == {8}, "the snapshot has it"
