"""Is there room for one more? A forecast of the pages in use that learns from how answers end.

Each answer that runs may end at any step, and then gives its pages back; until then it takes more. With the
chance that it still runs after t steps, taken from the answers that ended lately, both are known in the mean
and in their spread for every t, and a sequence is admitted if the peak stays below what there is. To sum up
how long each answer is expected to grow, as if all of them ended together, would leave much memory unused.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.tree import Match
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable

HISTORY = 512
"""Answers that the estimate rests on. It forgets the others, as users change what they ask for."""

PRIOR_WEIGHT = 2
"""So many more answers are imagined that end anywhere before their max_tokens with equal chance: all that is
known at the start, and of an answer that has outlived those that were seen."""

SPREAD = 2.0
"""Standard deviations above the mean that have to fit. Of 0 to 2, 2 retracts by far the fewest sequences, and
takes no more time for all of them."""

FORECASTS = 16
"""Steps from now at which the pages in use are forecast, as a geometric series."""


class OutputHistory:
    """How long answers become."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._sorted: NDArray[np.int64] | None = None

    def observe(self, num_output: int) -> None:
        """An answer has ended with so many tokens."""
        self._lengths.append(num_output)
        self._sorted = None

    def mean(self) -> float | None:
        """Mean length in tokens; None before the first answer."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def chance_to_go_on(
        self, num_output: NDArray[np.int64], max_output: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """How likely answers of ``num_output`` tokens, at most ``max_output``, get more than ``steps`` yet.

        Args:
            num_output: [n].
            max_output: [n].
            steps: [s].

        Returns:
            [n, s], between 0 and 1.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, dtype=np.int64))
        end = num_output[:, None] + steps
        longer_now = len(self._sorted) - np.searchsorted(self._sorted, num_output, "right")
        longer_then = len(self._sorted) - np.searchsorted(self._sorted, end, "right")
        rest = np.maximum(max_output - num_output, 1)
        prior = PRIOR_WEIGHT * np.maximum(1 - steps / rest[:, None], 0)
        chance = (longer_then + prior) / (longer_now + PRIOR_WEIGHT)[:, None]
        return np.where(end < max_output[:, None], chance, 0)


class Admission:
    """Weighs a sequence against the pages that are left and those that the running ones will take."""

    def __init__(self, slots: SlotTable, kv: KVCache, context_length: int) -> None:
        self.outputs = OutputHistory()
        self._slots = slots
        self._kv = kv
        self._steps = np.geomspace(1, context_length, FORECASTS).astype(np.int64)
        # the last page of an answer is half full in the mean
        self._growth = self._steps / slots.page_size + 0.5
        self._running: NDArray[np.float64] | None = None
        """Forecast for those that run, made when the step first asks for it."""
        self._candidate: NDArray[np.float64] | None = None
        """Forecast for the sequence weighed last; None if it needed none."""

    def begin_step(self) -> None:
        """Forget what was forecast before."""
        self._running = self._candidate = None

    def has_room_for(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether the pages suffice for this sequence and for what the running ones will still need.

        Whatever is expected of answers, those for the prompts are there: so a sequence that is admitted is
        computed in the same step, and work always goes on.
        """
        slots, self._candidate = self._slots, None
        if slots.num_used == 0:
            return True
        used = np.flatnonzero(slots.in_use)
        cached = 0 if match is None else match.num_pages
        available = self._kv.num_available - self._kv.num_pages_locked_by(match)
        longest = self._kv.pages_for(sequence.num_prompt + sequence.max_output) - cached
        if longest + slots.num_pages_to_come(used) <= available:
            return True  # whatever the answers
        prompt_pages = self._kv.pages_for(sequence.num_tokens) - cached
        available -= prompt_pages + slots.num_pages_to_prefill(used)
        if available < 0:
            return False
        if self._running is None:
            self._running = self._forecast(
                slots.num_output(used), slots.max_output(used), slots.num_pages_added(used)
            )
        self._candidate = self._forecast(
            np.array([sequence.num_output]),
            np.array([sequence.max_output]),
            np.array([prompt_pages]),
        )
        mean, variance = self._running + self._candidate
        return bool((mean + SPREAD * np.sqrt(variance)).max() <= available)

    def admitted(self) -> None:
        """The sequence that was weighed last runs now."""
        if self._running is None or self._candidate is None:
            self._running = None
        else:
            self._running += self._candidate

    def _forecast(
        self,
        num_output: NDArray[np.int64],
        max_output: NDArray[np.int64],
        returned: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Pages that these answers will have taken from now on, less those they have given back.

        Args:
            num_output: tokens of each, [n].
            max_output: [n].
            returned: pages that each gives back when it ends, besides those it takes from now on, [n].

        Returns:
            Mean and variance after each number of steps, [2, s].
        """
        chance = self.outputs.chance_to_go_on(num_output, max_output, self._steps)
        swing = self._growth + returned[:, None]
        mean = (swing * chance).sum(axis=0) - returned.sum()
        variance = (swing * swing * chance * (1 - chance)).sum(axis=0)
        return np.stack((mean, variance))
