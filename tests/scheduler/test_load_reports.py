"""A router is told the load and the changes of the cache at once after a pause, and of many short steps together."""

import msgspec
import pytest

from radixrt.kv.events import EventBatch
from radixrt.messages.replicas import ReplicaReport
from radixrt.scheduler.load import REPORT_S, LoadReports
from radixrt.scheduler.radix.kv_events.publisher import EventPublisher
from radixrt.scheduler.radix.kv_events.recorder import EventRecorder
from radixrt.scheduler.radix.kv_events.stream import EventStream
from tests.scheduler.engine_model import EngineModel, limits


class Reporting:
    """An engine whose reports are kept, at a time that is set by hand."""

    def __init__(self, *, is_public: bool = False) -> None:
        self.engine = EngineModel(limits())
        tree = self.engine.scheduler.kv.tree
        tree.observer = EventRecorder(64, tree.page_size, with_token_ids=False)
        self.events = EventPublisher(
            EventStream(tree.observer), "tcp://127.0.0.1:*" if is_public else None, None
        )
        self.now = 100.0
        self.sent: list[ReplicaReport] = []
        self.reports = LoadReports(
            self.engine.scheduler, self.events, self.sent.append, lambda: self.now
        )

    def step(self, seconds: float) -> None:
        """Compute another prompt of two pages."""
        self.now += seconds
        number = len(self.engine.requests)
        self.engine.add([number + 1] * 8, 1)
        self.engine.run()
        self.reports.after_step(received=number + 1)


def test_short_steps_are_reported_together() -> None:
    replica = Reporting()
    replica.step(0)
    assert len(replica.sent) == 1  # at once
    assert replica.reports.seconds_to_next() is None
    for _ in range(3):
        replica.step(REPORT_S / 4)
    assert len(replica.sent) == 1
    owed_s = replica.reports.seconds_to_next()
    assert owed_s == pytest.approx(REPORT_S / 4)
    replica.now += owed_s
    replica.reports.after_step(received=4)  # no step; the process was woken
    assert replica.reports.seconds_to_next() is None
    last = replica.sent[-1]
    batch = msgspec.msgpack.decode(last.events, type=EventBatch)
    assert last.load.received == 4 and last.sequence == batch.sequence == 2
    stored = b"".join(event.block_hashes for event in batch.events)  # type: ignore[union-attr]
    assert len(stored) == 3 * 2 * 8


def test_long_steps_are_reported_one_by_one() -> None:
    replica = Reporting()
    for _ in range(4):
        replica.step(REPORT_S)
    assert [report.load.received for report in replica.sent] == [1, 2, 3, 4]


def test_a_public_stream_is_told_of_each_step() -> None:
    replica = Reporting(is_public=True)
    for _ in range(4):
        replica.step(REPORT_S / 4)
    assert len(replica.sent) == 4
    replica.events.close()
