"""Learns the chance of a draft token to be accepted, and computes the number of draft tokens that pays.

A draft token survives if it and all before it are accepted. The first shows whether the source is the right one, so the tokens
behind it have a chance of their own: with the chances p and q, the i-th survives with p times q to the power of i - 1. It is worth its
row while that exceeds the price of a row: its time divided by the time of a token now. The price comes with the plan, so all
ranks draft alike; the chances depend on the tokens alone. A draft need not be computed to be judged: the answer shows whether it was right.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

KEPT = 0.97
"""Weight of a draft for each draft after it."""

FIRST_CHANCE = 0.5
"""Of drafters that guess."""
EXPECTED_CHANCE = 0.85
"""Before a drafter is known whose text the answer is expected to follow."""
_FIRST_WEIGHT = 2.0
"""Drafts for which the first chance counts."""
_COMMON_WEIGHT = 4.0
"""Drafts for which the chance in all slots counts in one."""

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
    """The chances of all drafters in all slots.

    Args:
        expected: drafters whose texts the answers are expected to follow.
    """

    def __init__(self, expected: Collection[int] = ()) -> None:
        self._expected = expected
        self._common: dict[Source, _Rates] = {}
        self._own: dict[int, dict[Source, _Rates]] = {}
        """By slot."""

    def admit(self, slot: int) -> None:
        """Forget the sequence that a slot had."""
        self._own[slot] = {}

    def of(self, slot: int, source: Source) -> Chance:
        """The chances of its tokens to be accepted."""
        common = self._common.get(source, _NEVER)
        own = self._own[slot].get(source, _NEVER)
        first, later = _FIRST_OF_EXPECTED if source[0] in self._expected else _FIRST
        first = own.first.value(common.first.value(first, _FIRST_WEIGHT), _COMMON_WEIGHT)
        later = own.later.value(common.later.value(later, _FIRST_WEIGHT), _COMMON_WEIGHT)
        return Chance(min(first, MAX_CHANCE), min(later, MAX_CHANCE))

    def learn(self, slot: int, source: Source, num_tried: int, num_right: int) -> None:
        """Note how many of the first tokens of a draft the answer has. The tokens behind the first wrong one say nothing."""
        for rates in (self._common, self._own[slot]):
            rates.setdefault(source, _Rates()).observe(num_tried, num_right)


class _Rate:
    """Accepted of tried tokens, the last ones counting most."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._accepted = self._tried = 0.0

    def observe(self, accepted: int, tried: int) -> None:
        self._accepted = KEPT * self._accepted + accepted
        self._tried = KEPT * self._tried + tried

    def value(self, expected: float, weight: float) -> float:
        """The rate, with ``weight`` tokens of an expected rate."""
        return (self._accepted + weight * expected) / (self._tried + weight)


class _Rates:
    """Those of the first tokens of drafts, and of the others."""

    __slots__ = ("first", "later")

    def __init__(self) -> None:
        self.first, self.later = _Rate(), _Rate()

    def observe(self, num_tried: int, num_right: int) -> None:
        self.first.observe(min(num_right, 1), 1)
        if num_right:  # what is not tried is forgotten, and so tried again
            self.later.observe(num_right - 1, min(num_right, num_tried - 1))


_NEVER = _Rates()
_FIRST = Chance(FIRST_CHANCE, FIRST_CHANCE)
_FIRST_OF_EXPECTED = Chance(EXPECTED_CHANCE, EXPECTED_CHANCE)
