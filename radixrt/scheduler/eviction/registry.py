"""Which eviction policies are there? The values of ``--eviction-policy``, and what each stands for."""

from collections.abc import Callable

from radixrt.scheduler.eviction.awaited import Awaited
from radixrt.scheduler.eviction.duel import Duel
from radixrt.scheduler.eviction.fifo import FIFO
from radixrt.scheduler.eviction.hinted import Hinted
from radixrt.scheduler.eviction.lru import LeafLRU
from radixrt.scheduler.eviction.names import EvictionPolicyName
from radixrt.scheduler.eviction.policy import EvictionPolicy
from radixrt.scheduler.eviction.priority import Priority


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
            return LeafLRU()
        case "fifo":
            return FIFO()
        case "priority":
            return Priority()
        case "duel":
            return Duel(num_pages, page_size, clock)
