"""Admits a sequence if a forecast of the pages in use leaves memory for it.

A running answer takes pages until it ends, and then returns them. The chance that it still runs
after t steps is estimated from the lengths of the last answers that ended. This gives mean and
variance of the pages in use after t steps, and a sequence is admitted if the peak over all t stays
below the size of the pool. The sum of the expected lengths, as if all answers ended together, would
leave much memory unused.
"""

import numpy as np
from numpy.typing import NDArray

from radixrt.scheduler.radix.node import Match
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.state import SchedulerState

SPREAD = 2.0
"""Standard deviations above the mean that must fit into the pool. Of 0 to 2, 2 retracts by far the
fewest sequences, and takes no more time for all of them."""

FORECASTS = 16
"""Steps from now at which the pages in use are forecast, as a geometric series."""


class Admission:
    """Compares a sequence's need with the free pages and the forecast for the running sequences."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.full_at: int | None = None
        """The number of sequences that ran when the last plan could admit no more of those that
        wait; None: nothing stopped it."""
        self._steps = np.geomspace(1, state.limits.context_length, FORECASTS).astype(np.int64)
        # the last page of an answer is half full in the mean
        self._growth = self._steps / state.slots.page_size + 0.5
        self._running: NDArray[np.float64] | None = None
        """Forecast for the running sequences, made at most once per step."""
        self._candidate: NDArray[np.float64] | None = None
        """Forecast for the sequence checked last; None if it needed none."""

    def begin_step(self) -> None:
        """Forget the forecasts of the step before."""
        self._running = self._candidate = None

    @property
    def is_full(self) -> bool:
        """The plan can admit no more."""
        return self.full_at is not None

    def note_full(self) -> None:
        """No further sequence can run beside those that do."""
        self.full_at = self._state.slots.num_used

    def has_room_for(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether the pages suffice for this sequence and the forecast for the running ones.

        Pages for the prompts must be free, for any forecast for the answers. So an admitted
        sequence is computed in the same step, and work always goes on.
        """
        slots, self._candidate = self._state.slots, None
        if slots.num_used == 0:
            return True
        used = np.flatnonzero(slots.in_use)
        cached = 0 if match is None else match.num_pages
        available = self._state.kv.num_available - self._state.kv.num_pages_locked_by(match)
        longest = self._state.kv.pages_for(sequence.num_prompt + sequence.max_output) - cached
        if longest + slots.num_pages_to_come(used) <= available:
            return True  # even if every answer becomes as long as allowed
        prompt_pages = self._state.kv.pages_for(sequence.num_tokens) - cached
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
        chance = self._state.outputs.chance_to_continue(num_output, max_output, self._steps)
        swing = self._growth + returned[:, None]
        mean = (swing * chance).sum(axis=0) - returned.sum()
        variance = (swing * swing * chance * (1 - chance)).sum(axis=0)
        return np.stack((mean, variance))
