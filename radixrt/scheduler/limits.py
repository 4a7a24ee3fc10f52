"""The settings that bound what a scheduler plans."""

from dataclasses import dataclass

from radixrt.scheduler.queue.queue_order import SchedulePolicy
from radixrt.scheduler.radix.eviction.registry import EvictionPolicyName


@dataclass(frozen=True)
class SchedulerLimits:
    """The settings that bound a plan. See the flags of the same names."""

    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    chunked_prefill_size: int
    context_length: int
    num_pages: int
    page_size: int
    schedule_policy: SchedulePolicy = "lpm"
    eviction_policy: EvictionPolicyName = "lru"
    max_pinned_fraction: float = 0.5
    max_pin_seconds: float = 3600.0
    share_prefixes: bool = True
    eos_token_ids: tuple[int, ...] = ()
    num_ranks: int = 1
    """Workers that each load every grammar."""
