"""Learns the chance of a draft token to be accepted, and computes the number of draft tokens that
pays.

A draft token survives if it and all before it are accepted. The first shows whether the source is
the right one, so the tokens behind it have a chance of their own: with the chances p and q, the
i-th survives with p times q to the power of i - 1. It is worth its row while that exceeds the price
of a row (:mod:`radixrt.worker.drafts.price`). The chances depend on the tokens alone, so all ranks
draft alike. A draft need not be computed to be judged: the answer shows whether it was right.

The sequences share the chances. To learn them for each sequence too has gained less than 3 % in
every workload of ``bench.speculation``, and lost as much in most.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

KEPT = 0.97
"""Weight of a draft for each draft after it."""

FIRST_CHANCE = 0.5
"""Chance of a token of a drafter that guesses, before anything is learned."""
EXPECTED_CHANCE = 0.85
"""The same for a drafter whose text the answer is expected to follow."""
_FIRST_WEIGHT = 2.0
"""Drafts for which the first chance counts."""

MAX_CHANCE = 0.995

Source = tuple[int, int]
"""A drafter, and the kind of its evidence."""


class Chance(NamedTuple):
    """That draft tokens are accepted, given that those before them are."""

    first: float
    later: float

    def paying_length(self, price: float, most: int) -> int:
        """Number of draft tokens whose chance to survive exceeds the price.

        >>> Chance(0.5, 0.5).paying_length(0.2, 8), Chance(0.5, 0.9).paying_length(0.2, 31)
        (2, 9)
        >>> Chance(0.2, 0.9).paying_length(0.2, 8)
        0
        """
        if self.first <= price:
            return 0
        if price <= 0:
            return most
        return min(most, math.ceil(math.log(price / self.first) / math.log(self.later)))

    def expected_accepted(self, num_drafted: int) -> float:
        """Mean number of draft tokens that are accepted.

        >>> Chance(0.5, 0.5).expected_accepted(2)
        0.75
        """
        return self.first * (1 - self.later**num_drafted) / (1 - self.later)

    def survival(self, num_drafted: int) -> float:
        """Chance that all are accepted, of at least one."""
        return self.first * self.later ** (num_drafted - 1)


class Chances:
    """The chances of all drafters.

    Args:
        expected: drafters whose texts the answers are expected to follow.
    """

    def __init__(self, expected: Collection[int] = ()) -> None:
        self._expected = expected
        self._rates: dict[Source, tuple[Rate, Rate]] = {}
        """Rates of the first tokens of drafts, and of the others."""

    def estimate(self, source: Source) -> Chance:
        """The chances of tokens of a source to be accepted."""
        expected = EXPECTED_CHANCE if source[0] in self._expected else FIRST_CHANCE
        first, later = self._rates.get(source, _UNTRIED)
        return Chance(
            min(first.value(expected, _FIRST_WEIGHT), MAX_CHANCE),
            min(later.value(expected, _FIRST_WEIGHT), MAX_CHANCE),
        )

    def learn(self, source: Source, num_tried: int, num_right: int) -> None:
        """Note how many of the first tokens of a draft the answer has. The tokens behind the first
        wrong one say nothing."""
        first, later = self._rates.setdefault(source, (Rate(KEPT), Rate(KEPT)))
        first.observe(min(num_right, 1), 1)
        if num_right:  # what is not tried is forgotten, and so tried again
            later.observe(num_right - 1, min(num_right, num_tried - 1))


class Rate:
    """A ratio of two sums over the last observations.

    Args:
        kept: weight of an observation for each one after it.
    """

    __slots__ = ("_count", "_kept", "_part")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._part = self._count = 0.0

    def observe(self, part: float, count: float) -> None:
        self._part = self._kept * self._part + part
        self._count = self._kept * self._count + count

    def value(self, expected: float, weight: float = 1e-9) -> float:
        """The ratio, as if ``weight`` counts of an expected ratio had been observed before."""
        return (self._part + weight * expected) / (self._count + weight)


_UNTRIED = Rate(KEPT), Rate(KEPT)
