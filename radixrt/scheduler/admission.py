"""How much KV the running sequences will still need: an estimate that learns from how answers end."""

import numpy as np
from numpy.typing import NDArray

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
