"""Holds the state that planning, admission and forecasts share, with the steps in flight."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.messages.stats import Counters, TimeHistogram
from radixrt.messages.steps import StepResult
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.disk.reads import Reads
from radixrt.scheduler.idle_work import IdleWork
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.output_history import OutputHistory
from radixrt.scheduler.queue.waiting_queue import ORDERS, WaitingQueue
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable
from radixrt.scheduler.step_times import StepShape, StepTimes


@dataclass(slots=True)
class StepInFlight:
    """A step without a result yet."""

    step_id: int
    sequences: list[Sequence | None]
    """The sequence that gets the tokens, by slot; None: they are dropped."""
    shape: StepShape
    follows: bool
    """It was sent while another step was in flight, so a worker that waited for it waited for the
    scheduler."""
    scored: int
    """Prompt tokens with log-probabilities."""
    is_idle: bool
    """It computes only work for idle times."""
    progress: dict[int, int]
    """Tokens of a prompt that are computed when it has ended, by slot, where a client wants to
    know."""


class StepsInFlight:
    """A queue: the worker answers steps in the order in which they were sent."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.next_id = 0
        """Id of the next step."""

    def __len__(self) -> int:
        return len(self._steps)

    def send(
        self,
        sequences: list[Sequence | None],
        shape: StepShape,
        *,
        scored: int = 0,
        progress: dict[int, int] | None = None,
        is_idle: bool = False,
    ) -> int:
        """Note a step for the sequences in the slots now; returns its id."""
        step_id = self.next_id
        self.next_id += 1
        follows, known = bool(self._steps), progress or {}
        step = StepInFlight(step_id, sequences.copy(), shape, follows, scored, is_idle, known)
        self._steps.append(step)
        return step_id

    def shapes(self) -> list[StepShape]:
        """The shapes of the steps, in order."""
        return [step.shape for step in self._steps]

    def take(self, result: StepResult) -> StepInFlight:
        """Remove and return the step of a result."""
        step = self._steps.popleft()
        assert step.step_id == result.step_id, "the worker answered steps out of order"
        return step

    def forget(self, sequence: Sequence) -> None:
        """Drop the tokens in flight of a sequence."""
        for step in self._steps:
            if step.sequences[sequence.slot] is sequence:
                step.sequences[sequence.slot] = None


STEP_BOUNDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
PLAN_BOUNDS = [1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25]
"""Bounds of the histograms of step and plan times, in seconds."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The running batch, the KV cache, the queue, the steps in flight, and the times learned."""

    limits: SchedulerLimits
    clock: Callable[[], float]
    """Seconds from any fixed moment; a replay of recorded traffic has its own."""
    slots: SlotTable
    kv: KVCache
    waiting: WaitingQueue
    idle: IdleWork
    in_flight: StepsInFlight
    outputs: OutputHistory
    """The lengths of the last answers."""
    times: StepTimes
    """The times of the last steps, and the forecast of the next ones."""
    counters: Counters
    reads: Reads | None
    """Reads of pages from disk; None: there are no pages on disk."""

    @staticmethod
    def empty(
        limits: SchedulerLimits, clock: Callable[[], float], disk: DiskPages | None = None
    ) -> "SchedulerState":
        """The state before the first request."""
        slots = SlotTable(
            limits.max_running_requests,
            -(-limits.context_length // limits.page_size),
            limits.page_size,
        )
        kv, times = KVCache(limits, slots, clock, disk), StepTimes(limits.max_step_ms)
        return SchedulerState(
            limits=limits,
            clock=clock,
            slots=slots,
            kv=kv,
            waiting=WaitingQueue(ORDERS[limits.settings.schedule_policy], kv),
            idle=IdleWork(limits.settings.idle_share, clock),
            in_flight=StepsInFlight(),
            outputs=OutputHistory(),
            times=times,
            reads=None if disk is None else Reads(disk, kv, times, clock),
            counters=Counters(
                step_seconds=TimeHistogram.empty(STEP_BOUNDS),
                plan_seconds=TimeHistogram.empty(PLAN_BOUNDS),
            ),
        )
