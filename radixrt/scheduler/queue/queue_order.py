"""The orders of the waiting queue: the values of ``--schedule-policy``.

Measured on recorded traffic (docs/internals/queue_order.md), the order has the largest effect on
the hit rate: longest prefix match gains some thirty points over first come first served where the
server is overloaded. Pure longest prefix match starves requests without a cached prefix. A bound on
their wait in seconds becomes first come first served under high load. A mixing ratio, where every
n-th pick is the oldest, keeps the gain and bounds the longest wait.
"""

from dataclasses import dataclass
from typing import Literal

from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.scheduler.sequence import Sequence


@dataclass(frozen=True)
class QueueOrder:
    """An order of waiting sequences."""

    prefers: Literal["long prefix", "short prefill", "age"]
    oldest_every: int = 1
    """Every n-th pick is the oldest sequence."""
    by_priority: bool = False
    """Order by the request's ``priority`` before everything else."""

    @property
    def depends_on_cache(self) -> bool:
        return self.prefers != "age"

    def rank(self, sequence: Sequence) -> int:
        """The first key, before age and prefix; the smallest first."""
        return sequence.options.priority if self.by_priority else 0

    def cost(self, sequence: Sequence, cached_tokens: int) -> int:
        """The key among sequences of one rank; the smallest first."""
        match self.prefers:
            case "long prefix":
                return -cached_tokens
            case "short prefill":
                return sequence.num_tokens - cached_tokens
            case "age":
                return 0


ORDERS: dict[SchedulePolicyName, QueueOrder] = {
    "lpm": QueueOrder("long prefix", oldest_every=4),
    "suf": QueueOrder("short prefill", oldest_every=8),
    "fcfs": QueueOrder("age"),
    "priority": QueueOrder("long prefix", oldest_every=4, by_priority=True),
}
