"""Chooses the sequence that is retracted when the KV pool has no free page.

The sequence with the shortest answer is retracted. It loses the least beyond its prompt, and its
prompt, recently used and often shared, is likely to be found in the tree again. Under simulated
overloads this rule recomputed as little as retracting the youngest. The rules by fewest pages, or
by fewest unshared pages, free so few pages each time that more was recomputed in total.

Why work always ends. Assume that no more requests arrive. Of the running sequences that still take
pages, call the oldest of the most urgent ones the *first*. It is never retracted while there is
another.

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

So a sequence finishes after a bounded number of steps. A retracted sequence is admitted again
before all sequences of its rank that have not been picked yet, so its KV is likely to be still in
the tree.
"""

from radixrt.scheduler.queue.queue_order import QueueOrder
from radixrt.scheduler.sequence import Sequence


def choose_victim(running: list[Sequence], order: QueueOrder) -> Sequence:
    """The sequence to retract. ``running`` are the sequences that still take pages, at least
    one."""
    oldest = min(running, key=lambda sequence: (order.rank(sequence), sequence.seq_id))
    others = [sequence for sequence in running if sequence is not oldest]
    return max(others or running, key=lambda s: (order.rank(s), -s.num_output, s.seq_id))
