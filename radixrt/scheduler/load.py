"""Measures the load of a scheduler for a router: work that waits, in seconds, and the use of the KV pool."""

import numpy as np

from radixrt.messages.replicas import ReplicaLoad
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.step_times import StepShape


def replica_load(scheduler: Scheduler, received: int) -> ReplicaLoad:
    """The load after a step was planned.

    Args:
        received: sequences that the scheduler has got since its start.
    """
    slots, times, kv = scheduler.slots, scheduler.step_times, scheduler.kv
    running = np.flatnonzero(slots.in_use)
    rest = slots.known[running] - slots.planned[running]
    context = int(slots.planned[slots.is_decoding].sum())
    decode = StepShape(int(slots.is_decoding.sum()), context)
    by_token, by_pair = times.prefill_costs
    by_prompt_token = max(times.seconds_per_prompt_token, by_token)
    decode_s = times.seconds(decode)
    most_prefill_s = scheduler.limits.max_prefill_tokens * by_prompt_token
    prefill_s = min(times.prefill_seconds(decode), most_prefill_s)
    slowdown = 1 + decode_s / prefill_s if prefill_s > 0 else 1.0
    per_token_s = by_prompt_token * slowdown
    page_size, tree = scheduler.limits.page_size, kv.tree
    return ReplicaLoad(
        received=received,
        step_s=scheduler.seconds_in_flight,
        partial_s=(rest[rest > 0] * per_token_s).tolist(),
        waiting_s=scheduler.waiting.prompt_tokens * per_token_s,
        slowdown=slowdown,
        seconds_per_token=by_token,
        seconds_per_pair=by_pair,
        running=scheduler.num_running,
        waiting=len(scheduler.waiting),
        context_tokens=int(np.maximum(slots.planned, slots.known)[running].sum()),
        held_tokens=page_size
        * (kv.allocator.num_pages - kv.allocator.num_free - tree.num_evictable_pages),
        free_tokens=page_size * kv.allocator.num_free,
        pool_tokens=page_size * kv.allocator.num_pages,
    )
