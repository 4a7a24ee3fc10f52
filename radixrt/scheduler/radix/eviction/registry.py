"""Which eviction policies are there? The values of ``--eviction-policy``, and what each stands for."""

from collections.abc import Callable

from radixrt.base.config import EvictionPolicyName
from radixrt.scheduler.radix.eviction.awaited import Awaited
from radixrt.scheduler.radix.eviction.by_key import (
    first_in_first_out,
    least_recently_used,
    least_urgent,
)
from radixrt.scheduler.radix.eviction.duel import Duel
from radixrt.scheduler.radix.eviction.hinted import Hinted
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy


def make_policy(
    name: EvictionPolicyName, num_pages: int, page_size: int, clock: Callable[[], float]
) -> EvictionPolicy:
    """A new policy for a pool of ``num_pages`` pages that heeds hints; ``clock`` gives seconds."""
    policy = Hinted(make_base_policy(name, num_pages, page_size, clock), clock)
    return Awaited(policy) if name == "duel" else policy


def make_base_policy(
    name: EvictionPolicyName, num_pages: int, page_size: int, clock: Callable[[], float]
) -> EvictionPolicy:
    """What orders the leaves that nobody has said anything of."""
    match name:
        case "lru":
            return least_recently_used()
        case "fifo":
            return first_in_first_out()
        case "priority":
            return least_urgent()
        case "duel":
            return Duel(num_pages, page_size, clock)
