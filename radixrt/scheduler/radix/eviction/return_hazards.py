"""How likely is a page to be used again, for each second that it stays? Learned from the traffic.

Proportional hazards (Cox, 1972): the chance of a return in the next second is a *baseline* that depends on the time since
the last use, times *odds* that depend on who was there: how many turns the conversation has had, how long its last
pause was, how long prompt and answer were. All requests together teach the baseline, and each level of each feature
teaches one factor of the odds, so a few hundred requests are enough. A class of its own for each combination
would need a hundred times as many, and on recorded traffic did worse than LRU.

The index of a page is the best quotient of returns and waiting over any horizon from its age on: Gittins' index
(1979) of the question whose next seconds are the best use of a place in the pool.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS_PER_OCTAVE = 2
SHORTEST_S = 0.5
NUM_BINS = 34
"""Ages up to half a second, then by factors of the square root of 2, up to half a day."""

NUM_CLASSES = 17
EVEN_ODDS = NUM_CLASSES // 2
"""Odds are kept in steps of the square root of 2, from 1/16 to 16; this is the class of odds 1."""

PRIOR_VISITS = 5.0
"""Weight of odds 1 in the estimate of each factor: so many visits that returned as often as everybody."""

FITTING_ROUNDS = 6
"""Of going through the features in turn, since the factors of one depend on those of the others. A fit begins with what the
one before has found."""

Features = tuple[int, int, int, int]
NUM_LEVELS = (5, 7, 20, 14)


def features_of(
    turns: int, pause_s: float | None, num_prompt: int, num_output: int | None
) -> Features:
    """Levels of what is known of a visit.

    Args:
        turns: 1, 2, 3-4, 5-8 and more are told apart.
        pause_s: before this turn, by powers of 4; None at the first.
        num_prompt: tokens, by powers of 4.
        num_output: tokens, by powers of 2; None as long as the answer is not complete.
    """
    return (
        min((turns - 1).bit_length(), NUM_LEVELS[0] - 1),
        0 if pause_s is None else min(1 + (int(pause_s / 2).bit_length() + 1) // 2, NUM_LEVELS[1] - 1),
        0 if num_output is None else min(1 + num_output.bit_length(), NUM_LEVELS[2] - 1),
        min(num_prompt.bit_length() // 2, NUM_LEVELS[3] - 1),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observations:
    """What became of visits; a row each."""

    features: NDArray[np.intp]
    """[n, number of features]."""
    num_pages: NDArray[np.float64]
    """Watched pages, [n]."""
    waited_s: NDArray[np.float64]
    """From the end of the request to the return, or to now, [n]."""
    returned: NDArray[np.bool_]
    """[n]."""


class ReturnHazards:
    """The baseline and the odds."""

    def __init__(self) -> None:
        self._index = [0.0] * NUM_BINS
        self._odds = [np.ones(levels) for levels in NUM_LEVELS]
        self._of_class = [2 ** ((kind - EVEN_ODDS) / 2) for kind in range(NUM_CLASSES)]

    def index(self, kind: int, age_s: float) -> float:
        """Returns per page-second over the best horizon, for a page of a class of odds and an age."""
        return self._of_class[kind] * self._index[age_bin(age_s)]

    def classify(self, features: Features) -> int:
        """The class of a visit's odds."""
        odds = math.prod(float(of[level]) for of, level in zip(self._odds, features, strict=True))
        return min(max(round(2 * math.log2(odds)) + EVEN_ODDS, 0), NUM_CLASSES - 1)

    def fit(self, seen: Observations) -> None:
        """Learn everything anew."""
        returns = seen.num_pages * seen.returned
        waits = seen.num_pages[:, None] * np.clip(seen.waited_s[:, None] - _STARTS, 0, _WIDTHS)
        bins = np.searchsorted(_STARTS, seen.waited_s, "right") - 1
        returns_at = np.bincount(bins, returns, NUM_BINS).astype(np.float64)
        waits_at = waits.sum(axis=0) + _WIDTHS
        self._index = _best_quotients(returns_at, waits_at)
        _fit_odds(self._odds, seen, returns, waits @ (returns_at / waits_at))


def _fit_odds(
    odds: list[NDArray[np.float64]],
    seen: Observations,
    returns: NDArray[np.float64],
    expected: NDArray[np.float64],
) -> None:
    """Move factors to where, level by level, as many returns are expected as were seen.

    Args:
        odds: the factors, changed in place; the features in turn, [levels] each.
        returns: pages, [n].
        expected: pages that would have returned at odds 1, [n].
    """
    prior = PRIOR_VISITS * float(seen.num_pages.mean())
    columns = [np.ascontiguousarray(column) for column in seen.features.T]
    product = expected * np.prod([of[c] for of, c in zip(odds, columns, strict=True)], axis=0)
    for _ in range(FITTING_ROUNDS):
        for number, (column, levels) in enumerate(zip(columns, NUM_LEVELS, strict=True)):
            old = odds[number]
            by_others = np.bincount(column, product, levels) / old
            odds[number] = (np.bincount(column, returns, levels) + prior) / (by_others + prior)
            product *= (odds[number] / old)[column]


def age_bin(age_s: float) -> int:
    if age_s < SHORTEST_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(BINS_PER_OCTAVE * math.log2(age_s / SHORTEST_S)))


_STARTS = np.array([0.0, *(SHORTEST_S * 2 ** (i / BINS_PER_OCTAVE) for i in range(NUM_BINS - 1))])
_WIDTHS = np.append(np.diff(_STARTS), _STARTS[-1])


def _best_quotients(returned: NDArray[np.float64], waited: NDArray[np.float64]) -> list[float]:
    """For each bin, the largest sum of returns over sum of waiting from that bin to any later one."""
    return [
        float((np.cumsum(returned[start:]) / np.cumsum(waited[start:])).max())
        for start in range(NUM_BINS)
    ]
