"""Who gives up its pages when they run out?

The one whose answer has come least far: what it loses beyond its prompt is least, and its prompt, used a
moment ago and often shared, is likely to be found in the tree again. Measured under heavy pressure, that costs
as little computation as the youngest or less, while to choose by fewest pages frees so few each time that more
is computed again in the end.

Why work always ends: the oldest of the most urgent sequences that run is never chosen while there is another.
If it decodes, it gets a token in every step until it has finished. If it still lacks pages for its prompt,
nobody is admitted (:mod:`radixrt.scheduler.admission` keeps those pages free), so every retraction leaves
fewer to share them with. Whoever was retracted is admitted again before anybody who has not been picked yet.
Alone, the oldest is set back only if the pages it lacks are held by sequences whose last tokens are under way:
those are free soon.
"""

from radixrt.scheduler.queue_order import QueueOrder
from radixrt.scheduler.sequence import Sequence


def choose_victim(running: list[Sequence], order: QueueOrder) -> Sequence:
    """Of the sequences that take more pages, the one to retract; at least one must be given."""
    oldest = min(running, key=lambda sequence: (order.rank(sequence), sequence.seq_id))
    others = [sequence for sequence in running if sequence is not oldest]
    return max(others or running, key=lambda s: (order.rank(s), -s.num_output, s.seq_id))
