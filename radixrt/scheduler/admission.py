"""Is there room for one more? An estimate of the KV yet to come that learns from how answers end."""

import numpy as np
from numpy.typing import NDArray

from radixrt.scheduler.kv_cache import KVCache
from radixrt.scheduler.radix_tree import Match
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable

START_SHARE = 0.5
SMALLEST_SHARE = 0.05
HEADROOM = 1.2
LEARNING_RATE = 0.05


class OutputEstimator:
    """Expects an answer to reach a share of its ``max_tokens``.

    The share follows the answers that end (a moving average, with headroom) and is raised by half each
    time memory ran out, that is, whenever it was too low.
    """

    def __init__(self) -> None:
        self._share = START_SHARE

    @property
    def share(self) -> float:
        return min(1.0, self._share * HEADROOM)

    def observe_finish(self, num_output: int, max_output: int) -> None:
        """An answer ended after ``num_output`` of at most ``max_output`` tokens."""
        self._share += LEARNING_RATE * (num_output / max_output - self._share)
        self._share = max(SMALLEST_SHARE, self._share)

    def observe_retraction(self) -> None:
        self._share = min(1.0, 1.5 * self._share)

    def remaining(
        self, num_output: NDArray[np.int64], max_output: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Tokens that answers of ``num_output`` tokens will still get: [n] each.

        An answer that has outlived the estimate is expected to go on for a tenth of what it has.
        """
        expected = np.maximum(self.share * max_output, 1.1 * num_output + 1).astype(np.int64)
        return np.minimum(expected, max_output) - num_output


class Admission:
    """Weighs a sequence against the pages that are left and those that the running ones will take."""

    def __init__(self, slots: SlotTable, kv: KVCache) -> None:
        self.outputs = OutputEstimator()
        self._slots = slots
        self._kv = kv

    def has_room_for(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether the pages suffice for this sequence and for what the running ones will still need."""
        if self._slots.num_used == 0:
            return True
        cached_pages = 0 if match is None else match.num_pages
        rest = self.outputs.remaining(
            np.array([sequence.num_output]), np.array([sequence.max_output])
        )
        needed = self._kv.pages_for(sequence.num_tokens + int(rest[0])) - cached_pages
        available = self._kv.num_available - self._kv.num_pages_locked_by(match)
        return needed + self._future_pages() <= available

    def _future_pages(self) -> int:
        """Pages that the running sequences are expected to take yet."""
        slots = self._slots
        used = np.flatnonzero(slots.in_use)
        max_output = slots.last_position[used] - slots.num_prompt[used] + 1
        reached = np.maximum(slots.planned[used], slots.known[used])
        rest = self.outputs.remaining(
            np.minimum(reached - slots.num_prompt[used], max_output), max_output
        )
        pages = -(-(reached + rest) // slots.page_size) - slots.num_pages[used]
        return int(np.maximum(pages, 0).sum())
