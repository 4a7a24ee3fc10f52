"""The worker's loop takes up plans while the device computes, and answers when no plan follows."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixrt.base.channels import Channels
from radixrt.base.ipc import Inbox, Outbox
from radixrt.base.liveness.heartbeat import Heartbeat
from radixrt.messages.grammars import DropGrammar
from radixrt.messages.ids import pack_ids
from radixrt.messages.links import ToSchedulerFromWorker
from radixrt.messages.steps import StepPlan, StepResult
from radixrt.worker.process import WorkerProcess


class Step:
    def __init__(self, step_id: int, done: threading.Event) -> None:
        self.step_id = step_id
        self.download = self
        self._done = done

    def is_ready(self) -> bool:
        return self._done.is_set()


class Runner:
    """Steps take until ``done`` is set; like the real one it collects a step when it launches the
    next."""

    def __init__(self) -> None:
        self.in_flight: Step | None = None
        self.images = None
        self.done = threading.Event()
        self.waited: list[float] = []
        self.orders: list[object] = []
        self.loading_s = 0.0
        self.heartbeat: Heartbeat | None = None

    def order(self, message: object) -> None:
        self.orders.append(message)

    def seconds_loading(self) -> float:
        return self.loading_s

    def step(self, plan: StepPlan, waited_s: float) -> list[StepResult]:
        self.waited.append(waited_s)
        results = self.collect()
        self.in_flight = Step(plan.step_id, self.done)
        return results

    def collect(self) -> list[StepResult]:
        step, self.in_flight = self.in_flight, None
        return [] if step is None else [StepResult(step_id=step.step_id, slots=b"", token_ids=pack_ids([]))]  # fmt: skip


class Stopped(Exception):
    pass


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Outbox, Inbox, Runner]]:
    """What the scheduler has of the channels, and the runner of a worker that is at work."""
    channels = Channels(Channels.make_run_dir())
    worker = object.__new__(WorkerProcess)
    runner = Runner()
    worker._runner, worker._answers = runner, True  # type: ignore[assignment]
    worker._inbox = Inbox(channels.address("scheduler", "worker0"), StepPlan | DropGrammar)
    to_worker = Outbox(channels.address("scheduler", "worker0"))
    results: Inbox = Inbox(channels.address("worker", "scheduler"), ToSchedulerFromWorker)
    worker._outbox = Outbox(channels.address("worker", "scheduler"))
    worker._heartbeat = runner.heartbeat = Heartbeat(channels.heartbeat_file("worker"))
    worker._step_timeout_s = 30.0
    worker._counts_experts = False

    def run() -> None:
        step = runner.step

        def step_or_stop(plan: StepPlan, waited_s: float) -> list[StepResult]:
            if plan.step_id < 0:
                raise Stopped
            return step(plan, waited_s)

        runner.step = step_or_stop  # type: ignore[method-assign]
        with pytest.raises(Stopped):
            worker.run()

    thread = threading.Thread(target=run)
    thread.start()
    yield to_worker, results, runner
    to_worker.send(StepPlan(step_id=-1))
    thread.join()
    for end in (to_worker, results, worker._inbox, worker._outbox):
        end.close()


def test_a_plan_is_taken_up_while_the_step_before_is_computed(ends) -> None:
    to_worker, results, runner = ends
    to_worker.send(StepPlan(step_id=0))
    to_worker.send(StepPlan(step_id=1))
    assert (
        results.receive().step_id == 0
    )  # collected by the launch of the next; nothing was done yet
    assert not runner.done.is_set()
    assert runner.waited[1] == 0.0, "the device had something to do"


def test_the_last_step_is_answered_when_it_is_done_and_nothing_follows(ends) -> None:
    to_worker, results, runner = ends
    to_worker.send(StepPlan(step_id=0))
    to_worker.send(DropGrammar(b"key"))  # orders about grammars don't wait for the step
    while not runner.orders:
        pass
    assert results.receive_waiting() == []
    runner.done.set()
    assert results.receive().step_id == 0


def test_a_worker_whose_grammar_does_not_load_is_overdue(ends) -> None:
    to_worker, results, runner = ends
    runner.done.set()
    to_worker.send(StepPlan(step_id=0))
    assert results.receive().step_id == 0
    assert not runner.heartbeat.is_overdue()
    runner.loading_s = 31.0  # the limit is 30
    to_worker.send(StepPlan(step_id=1))
    assert results.receive().step_id == 1
    assert runner.heartbeat.is_overdue()
