"""Keeps the lengths of the last answers, and estimates from them how long running answers go on."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

HISTORY = 512
"""Number of last answers in the estimate. Older ones are forgotten, because requests change."""

PRIOR_WEIGHT = 2
"""Weight of the prior, in answers whose length is uniform below their max_tokens. It decides at the
start, and for an answer that is longer than all in the history."""


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
        """Mean tokens still to come of an answer met at a random moment; long answers are met more
        often."""
        total = sum(self._lengths)
        return sum(n * n for n in self._lengths) / (2 * total) if total else 0.0

    def expected_rest(
        self, num_output: NDArray[np.int64], max_output: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Tokens that answers of ``num_output`` tokens, at most ``max_output``, are expected to get
        still.

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
        """Probability that answers of ``num_output`` tokens, at most ``max_output``, get more than
        ``steps`` further tokens.

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
