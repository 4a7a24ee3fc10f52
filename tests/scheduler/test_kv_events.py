"""A subscriber of the KV-event stream knows what is in the radix tree, whatever gets lost on the way."""

import re
import shutil
import tempfile
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

from radixrt.config import ServerConfig
from radixrt.errors import ConfigError
from radixrt.kv_events import EventBatch, ReplayRequest
from radixrt.messages import unpack_ids
from radixrt.scheduler.kv_events import publisher as publisher_module
from radixrt.scheduler.kv_events import stream as stream_module
from radixrt.scheduler.kv_events.publisher import EventPublisher, start_publisher
from radixrt.scheduler.kv_events.recorder import EventRecorder
from radixrt.scheduler.kv_events.stream import EventStream
from radixrt.scheduler.radix_tree import RadixTree
from tests.scheduler.engine_model import EngineModel, limits

PAGE = Path(__file__).parents[2] / "docs" / "kv_events.md"
DOCUMENTED: dict[str, Any] = {}
for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
    exec(compile(snippet, PAGE.name, "exec"), DOCUMENTED)


def hashes_in(tree: RadixTree) -> set[bytes]:
    """What the tree holds, by the rule of the documentation."""
    found: set[bytes] = set()
    for salt, root in tree.roots().items():
        pending: list[tuple[list[int], Any]] = [([], root)]
        while pending:
            before, node = pending.pop()
            tokens = before + node.tokens.tolist()
            if not node.children:
                found.update(DOCUMENTED["block_hashes"](tokens, tree.page_size, salt))
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

    @initialize(page_size=st.sampled_from([1, 3, 4]), buffer=st.sampled_from([0, 1, 3, 1000]))
    def start(self, page_size: int, buffer: int) -> None:
        self.page_size, self.buffer = page_size, buffer
        self.events = LossyEvents()
        self.states: dict[tuple[str, int], set[bytes]] = {}
        self.start_engine()
        self.mirror = DOCUMENTED["Mirror"](self.events, Replays(self.stream))

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
        self.tree = self.engine.scheduler.kv.tree
        num_pages = self.engine.scheduler.limits.num_pages
        self.tree.observer = EventRecorder(num_pages, self.page_size, with_token_ids=True)
        self.stream = EventStream(self.tree.observer, self.buffer)

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
