"""Is there room for one more? A forecast of the pages in use that learns from how answers end.

Each answer that runs may end at any step, and then gives its pages back; until then it takes more. With the
chance that it still runs after t steps, taken from the answers that ended lately, both are known in the mean
and in their spread for every t, and a sequence is admitted if the peak stays below what there is. To sum up
how long each answer is expected to grow, as if all of them ended together, would leave much memory unused.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from radixrt.scheduler.kv_cache import KVCache
from radixrt.scheduler.radix_tree import Match
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

    def has_room_for(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether the pages suffice for this sequence and for what the running ones will still need."""
        slots = self._slots
        if slots.num_used == 0:
            return True
        used = np.flatnonzero(slots.in_use)
        prompt_pages = self._kv.pages_for(sequence.num_tokens)
        prompt_pages -= 0 if match is None else match.num_pages
        available = self._kv.num_available - self._kv.num_pages_locked_by(match)
        available -= prompt_pages + slots.num_pages_to_prefill(used)
        if available < 0:
            return False
        num_output = np.append(slots.num_output(used), sequence.num_output)
        max_output = np.append(slots.max_output(used), sequence.max_output)
        returned = np.append(slots.num_pages_added(used), prompt_pages)
        chance = self.outputs.chance_to_go_on(num_output, max_output, self._steps)
        return self._peak(chance, returned) <= available

    def _peak(self, chance: NDArray[np.float64], returned: NDArray[np.int64]) -> float:
        """Most pages that answers will have taken, less those they have given back.

        Args:
            chance: that each goes on after each number of steps, [n, s].
            returned: pages that each gives back when it ends, besides those it takes from now on, [n].
        """
        # the last page of an answer is half full in the mean
        growth = self._steps / self._slots.page_size + 0.5
        taken = growth * chance.sum(axis=0) - returned @ (1 - chance)
        variance = ((growth + returned[:, None]) ** 2 * chance * (1 - chance)).sum(axis=0)
        return float((taken + SPREAD * np.sqrt(variance)).max())
