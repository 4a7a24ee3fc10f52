"""Learns the chance of a draft token to be accepted, and computes the number of draft tokens that pays.

A draft token survives if it and all before it are accepted: the i-th with the chance p to the power of i. It is worth its
row while that exceeds the price of a row: its time divided by the time of a token now. The price comes with the plan, so all
ranks draft alike; the chances depend on the tokens alone.
"""

import math
from collections.abc import Collection

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

RETRY_EVERY = 31
"""Drafts that do not pay after which one token is drafted all the same, since chances change. The scheduler learns from every
fourth step, so the number is odd."""

MOST_CHANCE = 0.995

Source = tuple[int, int]
"""A drafter, and the kind of its evidence."""


class Chances:
    """The chances of all drafters in all slots.

    Args:
        expected: drafters whose texts the answers are expected to follow.
    """

    def __init__(self, expected: Collection[int] = ()) -> None:
        self._expected = expected
        self._common: dict[Source, _Rate] = {}
        self._own: dict[int, dict[Source, _Rate]] = {}
        """By slot."""
        self._declined: dict[int, int] = {}
        """By slot: proposals that did not pay since one was drafted."""

    def admit(self, slot: int) -> None:
        """Forget the sequence that a slot had."""
        self._own[slot] = {}
        self._declined[slot] = 0

    def of(self, slot: int, source: Source) -> float:
        """The chance of one more token to be accepted."""
        first = EXPECTED_CHANCE if source[0] in self._expected else FIRST_CHANCE
        chance = self._common.get(source, _NEVER).value(first, _FIRST_WEIGHT)
        own = self._own[slot].get(source, _NEVER)
        return min(own.value(chance, _COMMON_WEIGHT), MOST_CHANCE)

    def learn(self, slot: int, source: Source, num_drafted: int, num_accepted: int) -> None:
        """Note the fate of a draft. The tokens behind the first that was rejected say nothing."""
        tried = min(num_accepted + 1, num_drafted)
        self._declined[slot] = 0
        for rates in (self._common, self._own[slot]):
            rates.setdefault(source, _Rate()).observe(num_accepted, tried)

    def decline(self, slot: int) -> bool:
        """Note that no draft pays in a slot; True if one token is to be drafted all the same."""
        self._declined[slot] += 1
        return self._declined[slot] >= RETRY_EVERY


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


_NEVER = _Rate()


def paying_length(chance: float, price: float, most: int) -> int:
    """Number of draft tokens whose chance to survive exceeds the price.

    >>> paying_length(0.5, 0.2, 8), paying_length(0.9, 0.2, 31), paying_length(0.2, 0.2, 8)
    (2, 15, 0)
    """
    if chance <= price:
        return 0
    if price <= 0 or chance >= 1:
        return most
    return min(most, math.ceil(math.log(price) / math.log(chance)) - 1)


def expected_accepted(chance: float, num_drafted: int) -> float:
    """Mean number of draft tokens that are accepted.

    >>> expected_accepted(0.5, 2)
    0.75
    """
    if chance >= 1:
        return num_drafted
    return chance * (1 - chance**num_drafted) / (1 - chance)
