"""Refuses requests that would wait too long: forecasts the wait of a request that arrives now.

The wait is the time until the first token, without the time to compute the request's own prompt.
The forecast counts the work ahead, in seconds of the worker: prompt tokens that are not cached, and
the expected rest of each answer, both times the cost of a token in the last steps
(:class:`radixrt.scheduler.step_times.StepTimes`).

- While slots and pages are free, only prompts are ahead. Of a prompt that is partly computed, as
  much counts as the new request has itself, because short prompts overtake long ones.
- Otherwise a running answer must end for each waiting request. When the request is admitted, all
  other slots are taken by answers somewhere in their middle, so their expected rest is not ahead.
  The rest of an answer met at a random moment is E[n^2] / 2 E[n] tokens, for answers of n tokens
  (Cox, Renewal Theory, 1962).

A factor corrects the forecast: the 90th percentile of the ratio of wait and forecast, learned from
forecasts without the factor, so the delay of a wait makes it not oscillate. A flood also makes the
answers slower, so the longest wait is shorter by the time that a mean answer takes longer now than
in the steps without a queue, but by half of it at most.

Before the costs and the lengths of some answers are known, the forecast is 0: nothing is refused on
a guess. Mooncake (Qin et al., FAST 2025) refuses early as well.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from radixrt.messages.sequences import SequenceRefused
from radixrt.scheduler.sequence import Groups, Sequence
from radixrt.scheduler.state import SchedulerState
from radixrt.scheduler.step_times import RecentRatio, StepShape

MIN_ANSWERS = 8
"""Answers that must have ended before lengths of answers count."""

PERCENTILE, STEP = 0.9, 0.1
"""The percentile of the ratio of wait and forecast that is followed, and the largest change of its
logarithm by one request."""

MAX_CORRECTION = 4.0
UNQUEUED_KEPT = 0.995
"""Weight of a step for each step after it, in the mean time of steps without a queue."""

MAX_SLOWER = 0.5
"""Share of the longest wait that answers may lose by becoming slower. The rest is for the wait in
any case."""

SHORTEST_WAIT_S = 0.5
"""Shorter waits say nothing about the forecast: they are of the order of some steps."""


class WaitForecast:
    """Reads the queue and the slots; learns from the waits of requests."""

    def __init__(self, state: SchedulerState, groups: Groups) -> None:
        self._state = state
        self._groups = groups
        self._correction = 1.0
        self._step_s, self._unqueued_step_s = RecentRatio(), RecentRatio(UNQUEUED_KEPT)

    def seconds(self, num_tokens: int, full_at: int | None) -> float:
        """The wait of a request whose prompt has ``num_tokens`` tokens, without the correction.

        Args:
            full_at: number of running sequences at which the last plan could admit no more; None:
                it could.
        """
        slots = self._state.slots
        if not self._state.times.is_known:
            return 0.0
        wait = self._prompts_ahead(num_tokens)
        is_full = full_at is not None or self._num_waiting >= slots.num_free
        if is_full and len(self._state.outputs) >= MIN_ANSWERS:
            wait = max(wait, self._work_ahead(full_at or len(slots.sequences)))
        return wait

    @property
    def _num_waiting(self) -> int:
        """Waiting sequences, with those of groups that are still to come."""
        return len(self._state.waiting) + self._groups.num_to_come

    def corrected(self, forecast_s: float) -> float:
        """A forecast times the learned factor."""
        return forecast_s * self._correction

    def longest(self, most_s: float) -> float:
        """The longest wait for which an answer ends at most ``most_s`` seconds later than without a
        queue."""
        mean_output = self._state.outputs.mean()
        if mean_output is None or not self._unqueued_step_s.value:
            return most_s
        slower_s = mean_output * (self._step_s.value - self._unqueued_step_s.value)
        return most_s - min(max(slower_s, 0.0), MAX_SLOWER * most_s)

    def observe_step(self, rows: int, step_s: float) -> None:
        """Learn from a step with ``rows`` decoding sequences how long they take for a token."""
        if rows and step_s > 0:
            self._step_s.observe(step_s, 1)
            if not self._num_waiting:
                self._unqueued_step_s.observe(step_s, 1)

    def observe(self, forecast_s: float, wait_s: float) -> None:
        """Learn from a request: its forecast without the correction, and its wait or a lower bound
        of it."""
        if forecast_s <= 0 or max(forecast_s, wait_s) < SHORTEST_WAIT_S:
            return
        longer = wait_s > forecast_s * self._correction
        change = STEP * (PERCENTILE if longer else PERCENTILE - 1)
        correction = self._correction * math.exp(change)
        self._correction = min(max(correction, 1 / MAX_CORRECTION), MAX_CORRECTION)

    def _prompts_ahead(self, num_tokens: int) -> float:
        slots = self._state.slots
        running = np.flatnonzero(slots.in_use)
        rest = np.maximum(slots.known[running] - slots.planned[running], 0)
        tokens = self._state.waiting.prompt_tokens + int(np.minimum(rest, num_tokens).sum())
        decode = StepShape(int(slots.is_decoding.sum()), 0)
        beside = self._state.times.seconds(decode)
        for_prompts = self._state.times.prefill_seconds(decode)
        return tokens * self._state.times.seconds_per_prompt_token * (1 + beside / for_prompts)

    def _work_ahead(self, capacity: int) -> float:
        """Work until a slot is free, if all work now is shared by ``capacity`` running
        sequences."""
        slots, outputs = self._state.slots, self._state.outputs
        running = np.flatnonzero(slots.in_use)
        prompt_tokens = np.maximum(slots.known[running] - slots.planned[running], 0).sum()
        num_output, max_output = slots.num_output(running), slots.max_output(running)
        output_tokens = outputs.expected_rest(num_output, max_output).sum()
        output_tokens -= (capacity - 1) * outputs.mean_rest()
        most_output = self._state.waiting.most_output + self._groups.output_to_come
        waiting = min(self._num_waiting * (outputs.mean() or 0.0), most_output)
        return max(
            0.0,
            (self._state.waiting.prompt_tokens + prompt_tokens)
            * self._state.times.seconds_per_prompt_token
            + (waiting + output_tokens) * self._state.times.seconds_per_output_token,
        )


class QueueTime:
    """The sequences that may have to be refused for their wait.

    Args:
        limit_s: most seconds until the first token, without the time for the own prompt; infinity:
            no limit.
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
