"""Measures the load of a scheduler for a router: work that waits, in seconds, and the use of the KV
pool; and reports it."""

import time
from collections.abc import Callable

import numpy as np

from radixrt.messages.replicas import ReplicaLoad, ReplicaReport
from radixrt.scheduler.radix.kv_events import EventPublisher
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.step_times import StepShape

REPORT_S = 0.02
"""Time in which a change is reported, if no step takes longer. With a report for each step, short
requests to a small model take 12 % more CPU time."""


def replica_load(scheduler: Scheduler, received: int) -> ReplicaLoad:
    """The load after a step was planned.

    Args:
        received: sequences that the scheduler has got since its start.
    """
    slots, times, kv = scheduler.state.slots, scheduler.state.times, scheduler.state.kv
    running = np.flatnonzero(slots.in_use)
    rest = slots.known[running] - slots.planned[running]
    context = int(slots.planned[slots.is_decoding].sum())
    decode = StepShape(int(slots.is_decoding.sum()), context)
    by_token, by_pair = times.prefill_costs
    by_prompt_token = max(times.seconds_per_prompt_token, by_token)
    decode_s = times.seconds(decode)
    most_prefill_s = scheduler.state.limits.max_prefill_tokens * by_prompt_token
    prefill_s = min(times.prefill_seconds(decode), most_prefill_s)
    slowdown = 1 + decode_s / prefill_s if prefill_s > 0 else 1.0
    per_token_s = by_prompt_token * slowdown
    page_size, tree = scheduler.state.limits.page_size, kv.tree
    return ReplicaLoad(
        received=received,
        step_s=scheduler.seconds_in_flight,
        partial_s=(rest[rest > 0] * per_token_s).tolist(),
        waiting_s=scheduler.state.waiting.prompt_tokens * per_token_s,
        slowdown=slowdown,
        seconds_per_token=by_token,
        seconds_per_pair=by_pair,
        waiting=len(scheduler.state.waiting),
        context_tokens=int(np.maximum(slots.planned, slots.known)[running].sum()),
        held_tokens=page_size
        * (kv.allocator.num_pages - kv.allocator.num_free - tree.num_evictable_pages),
        free_tokens=page_size * kv.allocator.num_free,
        pool_tokens=page_size * kv.allocator.num_pages,
    )


class LoadReports:
    """Tells a router the load and the changes of the cache: after a long step, after the last one,
    and of short steps together.

    Args:
        kv_events: the changes; where programs outside listen to them too, each step is reported.
        send: to the router.
        clock: seconds from any fixed moment.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_events: EventPublisher,
        send: Callable[[ReplicaReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._kv_events = kv_events
        self._send = send
        self._clock = clock
        self._due_at: float | None = None
        """None: the router knew everything after the last step."""

    def after_step(self, received: int) -> None:
        """Report, unless the steps in flight end before the report is due.

        Args:
            received: sequences that the scheduler has got since its start.
        """
        scheduler, now = self._scheduler, self._clock()
        if self._due_at is None:
            self._due_at = now + REPORT_S
        if (
            scheduler.num_in_flight
            and now + scheduler.seconds_in_flight < self._due_at
            and not self._kv_events.is_public
        ):
            return
        self._due_at = None
        batch, stream = self._kv_events.publish(), self._kv_events.stream
        self._send(
            ReplicaReport(
                load=replica_load(scheduler, received),
                stream=stream.name,
                sequence=stream.num_batches,
                events=batch or b"",
            )
        )
