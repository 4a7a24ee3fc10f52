"""Admits a sequence if a forecast of the pages in use leaves memory for it.

A running answer takes pages until it ends, and then returns them. The chance that it still runs after t steps is
estimated from the lengths of the last answers that ended. This gives mean and variance of the pages in use after t
steps, and a sequence is admitted if the peak over all t stays below the size of the pool. The sum of the expected
lengths, as if all answers ended together, would leave much memory unused.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.tree import Match
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable

HISTORY = 512
"""Number of last answers in the estimate. Older ones are forgotten, because requests change."""

PRIOR_WEIGHT = 2
"""Weight of the prior, in answers whose length is uniform below their max_tokens. It decides at the start, and for an
answer that is longer than all in the history."""

SPREAD = 2.0
"""Standard deviations above the mean that must fit into the pool. Of 0 to 2, 2 retracts by far the fewest sequences, and
takes no more time for all of them."""

FORECASTS = 16
"""Steps from now at which the pages in use are forecast, as a geometric series."""


class OutputHistory:
    """Lengths of the last answers."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._sorted: NDArray[np.int64] | None = None

    def observe(self, num_output: int) -> None:
        """Note the length of an answer that has ended."""
        self._lengths.append(num_output)
        self._sorted = None

    def __len__(self) -> int:
        return len(self._lengths)

    def mean(self) -> float | None:
        """Mean length in tokens; None before the first answer."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def mean_rest(self) -> float:
        """Mean tokens still to come of an answer met at a random moment; long answers are met more often."""
        total = sum(self._lengths)
        return sum(n * n for n in self._lengths) / (2 * total) if total else 0.0

    def expected_rest(
        self, num_output: NDArray[np.int64], max_output: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Tokens that answers of ``num_output`` tokens, at most ``max_output``, are expected to get still.

        An answer longer than all in the history is expected to double.

        Args:
            num_output: [n].
            max_output: [n].

        Returns:
            [n].
        """
        lengths = self._by_length()
        sums = np.append(np.cumsum(lengths[::-1])[::-1], 0)
        first = np.searchsorted(lengths, num_output, "right")
        longer = len(lengths) - first
        rest = np.where(longer > 0, sums[first] / np.maximum(longer, 1) - num_output, num_output)
        return np.minimum(rest, max_output - num_output)

    def chance_to_continue(
        self, num_output: NDArray[np.int64], max_output: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Probability that answers of ``num_output`` tokens, at most ``max_output``, get more than ``steps`` further tokens.

        Args:
            num_output: [n].
            max_output: [n].
            steps: [s].

        Returns:
            [n, s], between 0 and 1.
        """
        lengths = self._by_length()
        end = num_output[:, None] + steps
        longer_now = len(lengths) - np.searchsorted(lengths, num_output, "right")
        longer_then = len(lengths) - np.searchsorted(lengths, end, "right")
        rest = np.maximum(max_output - num_output, 1)
        prior = PRIOR_WEIGHT * np.maximum(1 - steps / rest[:, None], 0)
        chance = (longer_then + prior) / (longer_now + PRIOR_WEIGHT)[:, None]
        return np.where(end < max_output[:, None], chance, 0)

    def _by_length(self) -> NDArray[np.int64]:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, dtype=np.int64))
        return self._sorted


class Admission:
    """Compares a sequence's need with the free pages and the forecast for the running sequences."""

    def __init__(self, slots: SlotTable, kv: KVCache, context_length: int) -> None:
        self.outputs = OutputHistory()
        self._slots = slots
        self._kv = kv
        self._steps = np.geomspace(1, context_length, FORECASTS).astype(np.int64)
        # the last page of an answer is half full in the mean
        self._growth = self._steps / slots.page_size + 0.5
        self._running: NDArray[np.float64] | None = None
        """Forecast for the running sequences, made at most once per step."""
        self._candidate: NDArray[np.float64] | None = None
        """Forecast for the sequence checked last; None if it needed none."""

    def begin_step(self) -> None:
        """Forget the forecasts of the step before."""
        self._running = self._candidate = None

    def has_room_for(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether the pages suffice for this sequence and the forecast for the running ones.

        Pages for the prompts must be free, for any forecast for the answers. So an admitted sequence is computed in
        the same step, and work always goes on.
        """
        slots, self._candidate = self._slots, None
        if slots.num_used == 0:
            return True
        used = np.flatnonzero(slots.in_use)
        cached = 0 if match is None else match.num_pages
        available = self._kv.num_available - self._kv.num_pages_locked_by(match)
        longest = self._kv.pages_for(sequence.num_prompt + sequence.max_output) - cached
        if longest + slots.num_pages_to_come(used) <= available:
            return True  # even if every answer becomes as long as allowed
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
        """The sequence checked last runs now."""
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
        """Pages that these answers will take from now on, minus those they will return.

        Args:
            num_output: tokens of each, [n].
            max_output: [n].
            returned: pages that each returns when it ends, besides those it takes from now on, [n].

        Returns:
            Mean and variance after each number of steps, [2, s].
        """
        chance = self.outputs.chance_to_continue(num_output, max_output, self._steps)
        swing = self._growth + returned[:, None]
        mean = (swing * chance).sum(axis=0) - returned.sum()
        variance = (swing * swing * chance * (1 - chance)).sum(axis=0)
        return np.stack((mean, variance))
