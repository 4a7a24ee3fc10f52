"""A router is told the load and the changes of the cache: of short steps together, of a long one
and of the last one at once."""

import msgspec
import pytest

from radixrt.kv.events import EventBatch
from radixrt.messages.replicas import ReplicaReport
from radixrt.scheduler.process import REPORT_S, LoadReports
from radixrt.scheduler.radix.kv_events import EventPublisher, EventRecorder, EventStream
from radixrt.scheduler.scheduler import Scheduler
from tests.scheduler.engine_model import EngineModel, limits

SHORT_S, LONG_S = 0.3 * REPORT_S, 2 * REPORT_S


class Reporting:
    """An engine whose reports are kept. It computes an answer of seven tokens, one step at a
    time."""

    def __init__(self, *, step_s: float, is_public: bool = False) -> None:
        self.engine = EngineModel(limits())
        tree = self.engine.scheduler.state.kv.tree
        recorder = EventRecorder(64, tree.page_size, with_token_ids=False)
        tree.observers = (recorder,)
        address = "tcp://127.0.0.1:*" if is_public else None
        events = EventPublisher(EventStream(recorder), address, None)
        self.sent: list[ReplicaReport] = []
        self.sent_after: list[int] = []
        """Number of steps that were planned before each report."""
        now = 100.0
        reports = LoadReports(self.engine.scheduler, events, self.sent.append, lambda: now)
        self.engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 7)
        while True:
            is_over = self.engine.plan() is None
            reports.after_step(received=1)
            self.sent_after += [len(self.engine.plans)] * (len(self.sent) - len(self.sent_after))
            if is_over:
                break
            now += step_s
            self.engine.absorb()
        events.close()


@pytest.fixture
def step_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of each step, as the scheduler forecasts it."""
    seconds: float = request.param
    monkeypatch.setattr(
        Scheduler,
        "seconds_in_flight",
        property(lambda scheduler: seconds * scheduler.num_in_flight),
    )
    return seconds


@pytest.mark.parametrize("step_s", [SHORT_S], indirect=True)
def test_short_steps_are_reported_together_and_the_last_one_at_once(step_s: float) -> None:
    replica = Reporting(step_s=step_s)
    steps = len(replica.engine.plans)
    assert steps == 7 and replica.sent_after == [4, steps]
    batches = [msgspec.msgpack.decode(r.events, type=EventBatch) for r in replica.sent]
    assert [batch.sequence for batch in batches] == [r.sequence for r in replica.sent] == [1, 2]
    assert [report.load.context_tokens for report in replica.sent] == [12, 0]


@pytest.mark.parametrize("step_s", [LONG_S], indirect=True)
def test_long_steps_are_reported_when_they_begin(step_s: float) -> None:
    replica = Reporting(step_s=step_s)
    assert replica.sent_after == [*range(1, 8), 7]


@pytest.mark.parametrize("step_s", [SHORT_S], indirect=True)
def test_each_step_of_a_public_stream_is_reported(step_s: float) -> None:
    replica = Reporting(step_s=step_s, is_public=True)
    assert replica.sent_after == [*range(1, 8), 7]
