"""How likely is a page to be used again, for each second that it stays? Learned from the traffic.

Pages are told apart by the *turns* that led to their last use: who has come back three times comes back a fourth
time more often than a newcomer comes back at all. For each class of turns, counts over the time since the
last use say how many pages returned and how many page-seconds were spent waiting for it. Their quotient is
the hazard of a return. The index of a page is the best quotient over any horizon from its age on: Gittins' index
(1979) of the question whose next seconds are the best use of a place in the pool.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

NUM_CLASSES = 9
BINS_PER_OCTAVE = 2
SHORTEST_S = 0.5
NUM_BINS = 34
"""Ages up to half a second, then by factors of the square root of 2, up to half a day."""

PRIOR_PAGES = 8.0
"""Weight of all classes together in the estimate of one: as many pages of its own."""


def classify(turns: int, *, was_quick: bool) -> int:
    """1, 2, 3-4, 5-8 and more turns; from the second on apart by whether the last pause was a short one."""
    if turns <= 1:
        return 0
    group = 0 if turns == 2 else 1 if turns <= 4 else 2 if turns <= 8 else 3
    return 1 + 2 * group + was_quick


def age_bin(age_s: float) -> int:
    if age_s < SHORTEST_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(BINS_PER_OCTAVE * math.log2(age_s / SHORTEST_S)))


_STARTS = np.array([0.0, *(SHORTEST_S * 2 ** (i / BINS_PER_OCTAVE) for i in range(NUM_BINS - 1))])
_WIDTHS = np.append(np.diff(_STARTS), _STARTS[-1])


class ReturnHazards:
    """Counts of returns and of waiting, and the indices that follow from them."""

    def __init__(self) -> None:
        self._returned = np.zeros((NUM_CLASSES, NUM_BINS))
        self._waited = np.zeros((NUM_CLASSES, NUM_BINS))
        self._index = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]

    def index(self, kind: int, age_s: float) -> float:
        """Returns per page-second over the best horizon, for a page of a class and an age."""
        return self._index[kind][age_bin(age_s)]

    def observe_return(self, kind: int, age_s: float, num_pages: int) -> None:
        self._returned[kind, age_bin(age_s)] += num_pages
        self.observe_wait(kind, age_s, num_pages)

    def observe_wait(self, kind: int, age_s: float, num_pages: int) -> None:
        """Pages have waited so long and are not watched any more."""
        self._waited[kind] += num_pages * np.clip(age_s - _STARTS, 0, _WIDTHS)

    def decay(self, factor: float) -> None:
        """Let the past count less."""
        self._returned *= factor
        self._waited *= factor

    def refresh(self, watched: Iterable[tuple[int, float, int]]) -> None:
        """Work out the indices.

        Args:
            watched: class, age in seconds and number of the pages that wait at this moment.
        """
        waited = self._waited.copy()
        rows = np.array([*watched], dtype=np.float64).reshape(-1, 3)
        spent = rows[:, 2:] * np.clip(rows[:, 1:2] - _STARTS, 0, _WIDTHS)  # [visits, NUM_BINS]
        np.add.at(waited, rows[:, 0].astype(np.intp), spent)
        pooled = self._returned.sum(axis=0) / (waited.sum(axis=0) + _WIDTHS)
        returned = self._returned + PRIOR_PAGES * _WIDTHS * pooled
        waited += PRIOR_PAGES * _WIDTHS
        self._index = [_best_quotients(r, w) for r, w in zip(returned, waited, strict=True)]


def _best_quotients(returned: NDArray[np.float64], waited: NDArray[np.float64]) -> list[float]:
    """For each bin, the largest sum of returns over sum of waiting from that bin to any later one."""
    return [
        float((np.cumsum(returned[start:]) / np.cumsum(waited[start:])).max())
        for start in range(NUM_BINS)
    ]
