"""The time limit of the queue: refuses sequences that would wait too long, and those that have.

The limit is --max-queue-seconds, and for a sequence with a deadline also the time until then. A
group of sequences is refused as long as none of its prompts has begun.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from radixrt.messages.sequences import SequenceRefused
from radixrt.scheduler.queue.wait_forecast import WaitForecast
from radixrt.scheduler.sequence import Sequence


class QueueTime:
    """The sequences that may have to be refused for their wait.

    Args:
        limit_s: most seconds until the first token, without the time for the own prompt; infinity:
            no limit.
        clock: seconds from any fixed moment.
    """

    def __init__(self, limit_s: float, waits: WaitForecast, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._waits = waits
        self._clock = clock
        self._arrivals: OrderedDict[int, Sequence] = OrderedDict()
        """The sequences that wait, and some that run meanwhile, by id, in the order of their
        arrival."""

    def refusal(self, sequence: Sequence, full_at: int | None) -> SequenceRefused | None:
        """Refuse a sequence that would wait too long; notes its forecast.

        Args:
            full_at: number of running sequences at which the last plan could admit no more; None:
                it could.
        """
        waits = self._waits
        most_s = waits.longest(self._limit_s)
        sequence.forecast_wait_s = waits.seconds(sequence.num_tokens, full_at)
        wait_s = waits.corrected(sequence.forecast_wait_s)
        if sequence.options.deadline is not None:
            most_s = min(most_s, max(0.0, sequence.options.deadline - time.time()))
        if wait_s > most_s:
            return _too_late(sequence, f"would wait about {wait_s:.0f} s", wait_s - most_s)
        return None

    def watch(self, sequence: Sequence) -> None:
        """A sequence waits from now on."""
        if self._limit_s < math.inf and not sequence.group.has_begun:
            self._arrivals[sequence.seq_id] = sequence

    def overdue(self) -> Iterator[tuple[Sequence, SequenceRefused]]:
        """The sequences that have waited for too long, with their groups, and their refusals; no
        forecast is always right."""
        while self.seconds_to_next_overdue() == 0:
            _, first = self._arrivals.popitem(last=False)
            wait_s = self._clock() - first.arrived
            self._waits.observe(first.forecast_wait_s, wait_s)
            more_s = self._waits.corrected(first.forecast_wait_s) - wait_s
            for sequence in self._group_of(first):
                yield sequence, _too_late(sequence, f"has waited for {wait_s:.0f} s", more_s)

    def seconds_to_next_overdue(self) -> float | None:
        """Seconds until a sequence will have waited for too long; None if none waits."""
        while self._arrivals:
            first = next(iter(self._arrivals.values()))
            if not first.group.has_begun:
                limit_s = self._waits.longest(self._limit_s)
                return max(0.0, first.arrived + limit_s - self._clock())
            del self._arrivals[first.seq_id]
        return None

    def forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._arrivals.pop(seq_id, None)

    def _group_of(self, first: Sequence) -> list[Sequence]:
        """A waiting sequence, and those of its group that wait behind it."""
        if first.group.num_alive == 1:
            return [first]
        return [first, *(other for other in self._arrivals.values() if other.group is first.group)]


def _too_late(sequence: Sequence, wait: str, retry_after_s: float) -> SequenceRefused:
    message = f"The server is busy: the request {wait} (--max-queue-seconds, or its timeout); retry later."
    return SequenceRefused(sequence.seq_id, message, 503, max(1, min(60, math.ceil(retry_after_s))))
