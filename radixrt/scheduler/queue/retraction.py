"""Who gives up its pages when they run out?

The one whose answer has come least far: what it loses beyond its prompt is least, and its prompt, used a
moment ago and often shared, is likely to be found in the tree again. Measured under heavy pressure
(``python -m bench.retraction``; docs/queue_order.md), that costs as little computation as the youngest, while to choose by fewest
pages, or by fewest that nobody shares, frees so few each time that more is computed again in the end.

Why work always ends. Say that nobody arrives any more. Of the sequences that run and still take pages, call the oldest
of the most urgent the *first*. It is never chosen while there is another.

- If it decodes, it gets a token in every step and finishes, unless another becomes the first. That one is
  older or more urgent, so it happens at most once for each sequence there is.
- If it lacks pages for its prompt, nobody is admitted: admission keeps those pages free. So the others only become
  fewer, each having ended or given way after no more steps than its answer has tokens, and no request
  needs more than the whole pool.
- Alone, it is set back only if the pages it lacks are held by sequences whose last tokens are under way. Those
  finish with the steps in flight, whatever is planned meanwhile.
- Leases (:mod:`radixrt.scheduler.radix.leases`) hold pages as well, and are broken one by one where nobody runs and the prompt
  whose turn it is lacks pages, or where a sequence runs alone and lacks one.
- Nothing goes round in circles within one plan: whoever is admitted is computed in the same step (the scheduler
  asserts it), and a retraction after which nobody can be leaves one fewer to run.

So somebody finishes after a bounded number of steps. Whoever was retracted is admitted again before anybody of its rank
who has not been picked yet, so what it has computed is still likely to be in the tree.
"""

from radixrt.scheduler.queue.queue_order import QueueOrder
from radixrt.scheduler.sequence import Sequence


def choose_victim(running: list[Sequence], order: QueueOrder) -> Sequence:
    """Of the sequences that take more pages, the one to retract; at least one must be given."""
    oldest = min(running, key=lambda sequence: (order.rank(sequence), sequence.seq_id))
    others = [sequence for sequence in running if sequence is not oldest]
    return max(others or running, key=lambda s: (order.rank(s), -s.num_output, s.seq_id))
