"""Holds the state that planning, admission and forecasts share."""

from collections.abc import Callable
from dataclasses import dataclass

from radixrt.messages.stats import Counters, TimeHistogram
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.output_history import OutputHistory
from radixrt.scheduler.queue.queue_order import ORDERS
from radixrt.scheduler.queue.waiting_queue import WaitingQueue
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.slot_table import SlotTable
from radixrt.scheduler.step_times import StepTimes
from radixrt.scheduler.steps_in_flight import StepsInFlight

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
    in_flight: StepsInFlight
    outputs: OutputHistory
    """The lengths of the last answers."""
    times: StepTimes
    """The times of the last steps, and the forecast of the next ones."""
    counters: Counters

    @staticmethod
    def empty(limits: SchedulerLimits, clock: Callable[[], float]) -> "SchedulerState":
        """The state before the first request."""
        slots = SlotTable(
            limits.max_running_requests,
            -(-limits.context_length // limits.page_size),
            limits.page_size,
        )
        kv = KVCache(limits, slots, clock)
        return SchedulerState(
            limits=limits,
            clock=clock,
            slots=slots,
            kv=kv,
            waiting=WaitingQueue(ORDERS[limits.settings.schedule_policy], kv),
            in_flight=StepsInFlight(),
            outputs=OutputHistory(),
            times=StepTimes(limits.max_step_ms),
            counters=Counters(
                step_seconds=TimeHistogram.empty(STEP_BOUNDS),
                plan_seconds=TimeHistogram.empty(PLAN_BOUNDS),
            ),
        )
