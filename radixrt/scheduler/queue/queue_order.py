"""The order in which sequences are admitted, the values of ``--schedule-policy``, and retracted.

Measured on recorded traffic (docs/internals/queue_order.md), the order has the largest effect on
the hit rate: longest prefix match gains some thirty points over first come first served where the
server is overloaded. Pure longest prefix match starves requests without a cached prefix. A bound on
their wait in seconds becomes first come first served under high load. A mixing ratio, where every
n-th pick is the oldest, keeps the gain and bounds the longest wait.

When the KV pool has no free page, the sequence with the shortest answer is retracted. It loses the
least beyond its prompt, and its prompt, recently used and often shared, is likely to be found in
the tree again. Why work always ends. Assume that no more requests arrive. Of the running sequences
that still take pages, call the oldest of the most urgent ones the *first*. It is never retracted
while there is another.

- If the first decodes, it gets a token in every step and finishes, unless another sequence becomes
  the first. That one is older or more urgent, so this happens at most once for each sequence.
- If it lacks pages for its prompt, no sequence is admitted, because admission keeps those pages
  free. So the others become fewer: each ends or is retracted after no more steps than its answer
  has tokens. No request needs more than the pool.
- If it runs alone, it is retracted only if sequences whose last tokens are in flight hold the pages
  it lacks. Those finish with the steps in flight.
- Leases (:mod:`radixrt.scheduler.radix.leases`) hold pages as well. They are broken one by one if
  no sequence runs and the next prompt lacks pages, or if a sequence runs alone and lacks a page.
- One plan cannot loop for ever: an admitted sequence is computed in the same step (the planner
  asserts it), and a retraction after which none is admitted leaves one fewer running.

A retracted sequence is admitted again before all sequences of its rank that have not been picked
yet, so its KV is likely to be still in the tree.
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


def choose_victim(running: list[Sequence], order: QueueOrder) -> Sequence:
    """The sequence to retract. ``running`` are the sequences that still take pages, at least
    one."""
    oldest = min(running, key=lambda sequence: (order.rank(sequence), sequence.seq_id))
    others = [sequence for sequence in running if sequence is not oldest]
    return max(others or running, key=lambda s: (order.rank(s), -s.num_output, s.seq_id))
