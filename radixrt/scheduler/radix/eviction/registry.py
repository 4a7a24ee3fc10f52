"""The eviction policies by name: the values of ``--eviction-policy``."""

from collections.abc import Callable

from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.scheduler.radix.eviction.awaited import Awaited
from radixrt.scheduler.radix.eviction.by_key import (
    first_in_first_out,
    least_recently_used,
    least_urgent,
)
from radixrt.scheduler.radix.eviction.hinted import Hinted
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy

Clock = Callable[[], float]

POLICIES: dict[EvictionPolicyName, Callable[[Clock], EvictionPolicy]] = {
    "lru": lambda clock: Awaited(Hinted(least_recently_used(), clock)),
    "fifo": lambda clock: Hinted(first_in_first_out(), clock),
    "priority": lambda clock: Hinted(least_urgent(), clock),
}


def make_policy(name: EvictionPolicyName, clock: Clock) -> EvictionPolicy:
    """A new policy; ``clock`` gives seconds."""
    return POLICIES[name](clock)
