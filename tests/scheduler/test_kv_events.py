"""A subscriber of the KV-event stream knows what is in the radix tree, whatever gets lost on the
way."""

import contextlib
import runpy
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.kv.events import EventBatch, ReplayRequest
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.radix import kv_events
from radixrt.scheduler.radix.kv_events import (
    EventPublisher,
    EventRecorder,
    EventStream,
    start_publisher,
)
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.engine_model import EngineModel, limits

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_event_mirror.py"
DOCUMENTED = runpy.run_path(str(EXAMPLE))


def hashes_in(tree: RadixTree) -> set[bytes]:
    """What the tree holds, by the rule of the documentation."""
    found: set[bytes] = set()
    for name, root in tree.roots().items():
        pending: list[tuple[list[int], Any]] = [([], root)]
        while pending:
            before, node = pending.pop()
            tokens = before + node.tokens.tolist()
            if not node.children:
                found.update(DOCUMENTED["block_hashes"](tokens, tree.page_size, *name))
            pending += [(tokens, child) for child in node.children.values()]
    return found


class LossyEvents:
    """In the place of a SUB socket."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def poll(self, _patience_ms: int) -> bool:
        return bool(self.frames)

    def recv(self) -> bytes:
        return self.frames.popleft()


class Replays:
    """In the place of a REQ socket."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.reply = b""

    def send(self, frame: bytes) -> None:
        self.reply = self.stream.replay(msgspec.msgpack.decode(frame, type=ReplayRequest))

    def recv(self) -> bytes:
        return self.reply


STEMS = [[i % 5 for i in range(40)], [i % 5 for i in range(20)] + [9] * 30, []]


class MirrorMachine(RuleBasedStateMachine):
    """An engine, a subscriber, and a link between them that loses batches."""

    subscriber = DOCUMENTED["Mirror"]

    @initialize(page_size=st.sampled_from([1, 3, 4]), buffer=st.sampled_from([0, 1, 3, 1000]))
    def start(self, page_size: int, buffer: int) -> None:
        self.page_size, self.buffer = page_size, buffer
        self.events = LossyEvents()
        self.states: dict[tuple[str, int], set[bytes]] = {}
        self.start_engine()
        self.mirror = self.subscriber(self.events, Replays(self.stream))

    def start_engine(self) -> None:
        self.engine = EngineModel(
            limits(
                page_size=self.page_size,
                num_pages=-(-96 // self.page_size) + 8,
                context_length=96,
                chunked_prefill_size=16,
                max_running_requests=4,
            )
        )
        self.tree = self.engine.scheduler.state.kv.tree
        num_pages = self.engine.scheduler.state.limits.num_pages
        recorder = EventRecorder(num_pages, self.page_size, with_token_ids=True)
        self.tree.observers = (recorder,)
        self.stream = EventStream(recorder, self.buffer)

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 50),
        tail=st.lists(st.integers(0, 4), min_size=1, max_size=9),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def work(self, stem: list[int], cut: int, tail: list[int], max_tokens: int, salt: str) -> None:
        self.engine.add(stem[:cut] + tail, max_tokens, salt=salt)
        self.steps(3)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if len(self.engine.sent) < 2:
                self.engine.plan()
            if self.engine.sent:
                self.engine.absorb()
        self.publish()

    @rule()
    def fail(self) -> None:
        if self.engine.sent:
            self.engine.absorb(fail_first=True)
        self.publish()

    @rule()
    def flush(self) -> None:
        self.engine.scheduler.flush_cache()
        self.publish()

    @rule()
    def restart(self) -> None:
        self.start_engine()
        self.mirror.replays = Replays(self.stream)

    def publish(self) -> None:
        frame = self.stream.next_batch()
        if frame is not None:
            batch = msgspec.msgpack.decode(frame, type=EventBatch)
            self.states[batch.stream, batch.sequence] = hashes_in(self.tree)
            self.events.frames.append(frame)

    @precondition(lambda self: self.events.frames)
    @rule(count=st.integers(1, 4))
    def lose(self, count: int) -> None:
        for _ in range(min(count, len(self.events.frames))):
            self.events.frames.popleft()

    @rule()
    def listen(self) -> None:
        """After a silence, or a gap, the subscriber asks; then it lacks nothing."""
        silent = not self.events.frames
        self.mirror.update()
        if silent:
            assert self.mirror.hashes == hashes_in(self.tree)

    @invariant()
    def mirror_is_the_tree_of_its_moment(self) -> None:
        if hasattr(self, "mirror") and self.mirror.next > 1:
            known = self.states[self.mirror.stream, self.mirror.next - 1]
            assert self.mirror.hashes == known

    def teardown(self) -> None:
        if hasattr(self, "mirror"):
            self.events.frames.clear()
            self.mirror.update()
            assert self.mirror.hashes == hashes_in(self.tree)


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Publishing:
    """A tree whose changes are published on real sockets."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        addresses = {
            "kv_events": f"ipc://{folder}/events",
            "kv_events_replay": f"ipc://{folder}/replays",
        }
        config = ServerConfig(**{**addresses, **settings})
        assert config.kv_events is not None and config.kv_events_replay is not None
        self.events, self.replays = config.kv_events, config.kv_events_replay
        self.tree = RadixTree(page_size=2)
        started = start_publisher(config, self.tree, 400_000)
        assert started is not None
        self.publisher: EventPublisher = started
        self.next_page = 0

    def insert(self, tokens: list[int], salt: str = "") -> None:
        root = self.tree.lock_root(CacheRoot(salt=salt))
        pages = np.arange(len(tokens) // self.tree.page_size, dtype=np.int32) + self.next_page
        self.next_page += len(pages)
        node, _ = self.tree.insert(root, np.array(tokens, dtype=np.int32), pages)
        self.tree.move_lock(root, node)
        self.tree.unlock(node)
        self.publisher.publish()

    def answer(self) -> None:
        """Wait for a replay request and answer it, as the scheduler process does."""
        assert self.publisher.socket is not None and self.publisher.socket.poll(5000)
        self.publisher.publish()


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rx"))  # pytest's own paths are too long for sockets
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def publishing(folder: Path) -> Iterator[Publishing]:
    publishing = Publishing(folder)
    yield publishing
    publishing.publisher.close()


def connect(kind: int, address: str, **options: int) -> zmq.Socket:
    socket: zmq.Socket = zmq.Context.instance().socket(kind)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(address)
    return socket


def ask(publishing: Publishing, stream: str, sequence: int) -> list[EventBatch]:
    with connect(zmq.REQ, publishing.replays, RCVTIMEO=5000, LINGER=0) as request:
        request.send(msgspec.msgpack.encode({"stream": stream, "sequence": sequence}))
        publishing.answer()
        return msgspec.msgpack.decode(request.recv(), type=list[EventBatch])


def test_hashes_are_those_that_b2sum_computes() -> None:
    """``printf '\\0\\0\\0\\0\\6\\0\\0\\0tenant\\0\\0\\0\\0' | b2sum -l 64``, then ``(printf %s HASH | xxd -r -p;
    printf TOKENS) | b2sum -l 64``."""
    hashes = list(DOCUMENTED["block_hashes"]([0x61626364, 0x65666768, 5], 2, salt="tenant"))
    assert hashes == [bytes.fromhex("2222bf4f23e74d76")]
    hashes = list(DOCUMENTED["block_hashes"]([0x61626364], 1, adapter="ad"))
    assert hashes == [bytes.fromhex("be5f4afda864a42c")]
    hashes = list(DOCUMENTED["block_hashes"]([0x61626364, 0x65666768], 1))
    assert hashes == [bytes.fromhex("7656e403cc38be49"), bytes.fromhex("d1a03e73b256ffe2")]


def test_a_replay_brings_the_batches_that_were_missed(publishing: Publishing) -> None:
    publishing.insert([1, 2, 3, 4])
    (snapshot,) = ask(publishing, "", 0)
    publishing.insert([1, 2, 5, 6])
    publishing.insert([7, 7])
    missed = ask(publishing, snapshot.stream, snapshot.sequence + 1)
    assert [batch.sequence for batch in missed] == [2, 3]
    assert ask(publishing, snapshot.stream, 4) == []
    (too_far,) = ask(publishing, snapshot.stream, 5)  # nobody can have heard of batch 4
    assert [type(event).__name__ for event in too_far.events] == ["AllBlocks"]


def test_what_is_not_kept_any_more_is_replaced_by_a_snapshot(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing.insert([1, 2])
    (first,) = ask(publishing, "", 0)
    monkeypatch.setattr(kv_events, "MAX_BUFFER_BYTES", 100)
    publishing.insert([3, 4, 5, 6, 7, 8])
    (snapshot,) = ask(publishing, first.stream, 2)
    (event,) = snapshot.events
    assert type(event).__name__ == "AllBlocks" and snapshot.sequence == 2
    assert len(event.block_hashes) == 4 * 8


def test_events_tell_token_ids_only_if_asked(folder: Path) -> None:
    for tell in (False, True):
        publishing = Publishing(folder, kv_events_tokens=tell)
        publishing.insert([1, 2])
        known = ask(publishing, "", 0)[0]
        publishing.insert([1, 2, 3, 4])
        publishing.insert([9, 9], "tenant")
        plain, salted = (batch.events[0] for batch in ask(publishing, known.stream, 2))
        assert plain.parent_hash == next(DOCUMENTED["block_hashes"]([1, 2], 2))
        assert not plain.salted and salted.salted and salted.parent_hash is None
        told = [event.token_ids for event in (plain, salted)]
        assert [ids and unpack_ids(ids).tolist() for ids in told] == (
            [[3, 4], [9, 9]] if tell else [None, None]
        )
        publishing.publisher.close()


def test_an_emptied_cache_is_told_in_a_word(publishing: Publishing) -> None:
    publishing.insert([1, 2, 3, 4, 5, 6])
    (known,) = ask(publishing, "", 0)
    publishing.tree.evict(1)
    publishing.publisher.publish()
    publishing.tree.evict(2)
    names = [
        [type(event).__name__ for event in batch.events]
        for batch in ask(publishing, known.stream, known.sequence + 1)
    ]
    assert names == [["BlockRemoved"], ["AllBlocksCleared"]]


def test_a_subscriber_that_does_not_read_is_left_behind_and_catches_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_QUEUED_BATCHES", 2)
    publishing = Publishing(folder)
    stream, random = publishing.publisher.stream, np.random.default_rng(0)
    stream.max_batches = 3
    with (
        connect(zmq.SUB, publishing.events, RCVHWM=1) as subscriber,
        connect(zmq.REQ, publishing.replays, RCVTIMEO=5000, LINGER=0) as request,
    ):
        while not subscriber.poll(20):  # until it is connected
            publishing.insert(random.integers(0, 1000, 2).tolist())
        for _ in range(300):  # of 8 kB: more than the sockets' own buffers take
            publishing.insert(random.integers(0, 1000, 2048).tolist())
        mirror = DOCUMENTED["Mirror"](subscriber, request)
        with answering(publishing):
            while mirror.next <= stream.num_batches:
                mirror.update(100)
        assert mirror.hashes == hashes_in(publishing.tree)
        num_received = sum(1 for _ in iter(lambda: subscriber.poll(100) and subscriber.recv(), 0))
    assert num_received < 200 and stream.num_snapshots == 1
    publishing.publisher.close()


@contextlib.contextmanager
def answering(publishing: Publishing) -> Iterator[None]:
    """Meanwhile somebody else answers replay requests."""
    ended = threading.Event()

    def answer() -> None:
        assert publishing.publisher.socket is not None
        while not ended.is_set():
            publishing.publisher.socket.poll(20)
            publishing.publisher.publish()

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_a_malformed_request_is_counted_and_hurts_nobody(publishing: Publishing) -> None:
    with connect(zmq.DEALER, publishing.replays, LINGER=0) as stranger:
        for frame in (b"", b"\xc1", msgspec.msgpack.encode({"sequence": "x"})):
            stranger.send_multipart([b"", frame])
            publishing.answer()
    stats = publishing.publisher.add_stats(
        EngineModel(limits()).scheduler.stats(malformed_frames=2)
    )
    assert stats.malformed_frames == 5
    assert ask(publishing, "", 0)[0].sequence == 0


def test_a_client_that_reads_no_replies_fills_no_memory(publishing: Publishing) -> None:
    publishing.insert(np.arange(20_000).tolist())  # a snapshot of 80 kB
    request = msgspec.msgpack.encode({"stream": "", "sequence": 0})
    with connect(zmq.DEALER, publishing.replays, LINGER=0, RCVHWM=1) as greedy:
        for _ in range(100):
            greedy.send_multipart([b"", request])
            publishing.answer()
        replies = sum(1 for _ in iter(lambda: greedy.poll(100) and greedy.recv_multipart(), 0))
    assert publishing.publisher.stream.num_snapshots == 100 and replies < 50


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "tcp://IP:PORT"),
        ({"kv_events_replay": "ipc:///tmp/x"}, "need --kv-events"),
        ({"kv_events_tokens": True}, "need --kv-events"),
        ({"kv_events": "ipc:///tmp/x", "disable_radix_cache": True}, "leave one out"),
        ({"kv_events": "ipc:///no/such/folder/x"}, "folder that exists"),
        ({"kv_events": "tcp://no.such.host.invalid:1"}, "IP address of this machine"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        start_publisher(ServerConfig(**settings).validate(), RadixTree(2), 10)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_tcp_serves_as_well(folder: Path, host: str) -> None:
    with taken_port(host.strip("[]")) as port:
        pass
    address = f"tcp://{host}:{port}"
    publishing = Publishing(folder, kv_events_replay=address)
    publishing.insert([1, 2])
    with connect(zmq.REQ, address, RCVTIMEO=5000, LINGER=0, IPV6=1) as request:
        request.send(msgspec.msgpack.encode({"stream": "", "sequence": 0}))
        publishing.answer()
        assert len(msgspec.msgpack.decode(request.recv())) == 1
    publishing.publisher.close()


def test_a_port_in_use_is_refused() -> None:
    with taken_port() as port:
        config = ServerConfig(kv_events=f"tcp://127.0.0.1:{port}").validate()
        with pytest.raises(ConfigError, match=f"cannot listen on .*{port} .*free port"):
            start_publisher(config, RadixTree(2), 10)


@contextlib.contextmanager
def taken_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that somebody else has."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        try:
            taken.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        taken.listen()
        yield taken.getsockname()[1]
