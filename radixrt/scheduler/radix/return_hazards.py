"""Learns which prefixes are likely to be used again, for each second that they stay.

Proportional hazards (Cox, 1972): the chance that a prefix returns in the next second is a *baseline*,
which depends on the time since its last use, times *odds*, which depend on the request that used it
last: on the turn of its conversation, the pause before it, and the length of its answer. A prefix is
worth the highest rate of returns over any time from now on (Gittins, 1979), as it may return after a
pause in which it does not.
"""

import math
from bisect import bisect

import msgspec
import numpy as np
from numpy.typing import NDArray

_STARTS_S = [0.0, *(2 ** (step / 2 - 1) for step in range(33))]
"""Ages from which on the baseline differs: half a second and on by half octaves, to nine hours."""
CLASSES_PER_OCTAVE = 2
NUM_CLASSES = 8 * CLASSES_PER_OCTAVE + 1
"""Classes of odds, from 1/16 to 16."""
EVEN_ODDS = NUM_CLASSES // 2
"""The class of odds 1."""
MAX_VISITS = 4096
"""The visits that are learned from: the last ones."""
FIT_EVERY, FIRST_FIT = 256, 32
"""Visits from one fit to the next; at the start an eighth of those seen."""
PRIOR_VISITS = 5.0
"""Visits that return as often as all do, as which the odds of each level begin."""
_NUM_LEVELS = (4, 16, 6)
"""How many levels turns, lengths of answers and pauses have."""
_FITTING_ROUNDS = 6
"""Each round fits the odds of one feature after the other, with those of the others as they are."""
_ODDS_OF_CLASS = [2.0 ** ((kind - EVEN_ODDS) / CLASSES_PER_OCTAVE) for kind in range(NUM_CLASSES)]
_WIDTHS_S = np.diff(_STARTS_S, append=2 * _STARTS_S[-1])

_Floats = NDArray[np.float64]


class Visit(msgspec.Struct, gc=False, eq=False):
    """A request, as the last use of a prefix."""

    turn: int = 1
    """Its number in its conversation."""
    pause_s: float | None = None
    """The time from the end of the turn before it until it began."""
    kind: int = EVEN_ODDS
    """The class of its odds, like the next ones once it has ended."""
    number: int = -1
    """Its number among those that have ended."""
    num_pages: int = 0
    """Pages of its whole prefix."""
    ended_s: float = 0.0


SHARED = Visit()
"""Stands in the place of a visit on a prefix that has had several continuations: none of them alone
says when it returns."""


class ReturnHazards:
    """The baseline, and the odds of each class of requests."""

    def __init__(self) -> None:
        self._rates: list[float] = [1 / (start + 1) for start in _STARTS_S]
        self._odds = [np.ones(count) for count in _NUM_LEVELS]
        self._count, self._next_fit = 0, FIRST_FIT
        self._levels = np.zeros((len(_NUM_LEVELS), MAX_VISITS), np.intp)
        """A column for each of the last visits, as in the arrays below."""
        self._pages, self._ended_s, self._waited_s = np.zeros((3, MAX_VISITS))
        """Seconds from its end to its return are NaN as long as there was none."""

    def begin(self, before: Visit | None, now: float) -> Visit:
        """The visit of a request that begins; ``before``, the turn before it, has returned."""
        if before is None:
            return Visit()
        pause_s, place = now - before.ended_s, before.number % MAX_VISITS
        if before.number >= self._count - MAX_VISITS and np.isnan(self._waited_s[place]):
            self._waited_s[place] = pause_s
        return Visit(before.turn + 1, pause_s)

    def end(self, visit: Visit, num_output: int, own_pages: int, now: float) -> None:
        """A visit ends.

        Args:
            num_output: tokens of its answer.
            own_pages: those of its prefix that no other visit has shared. What is learned of it is
                weighted by them.
            now: in seconds.
        """
        if self._count >= self._next_fit:
            self._next_fit += min(FIT_EVERY, max(FIRST_FIT, self._count // 8))
            self._fit(now)
        levels, place = _levels(visit, num_output), self._count % MAX_VISITS
        odds = math.prod(float(of[level]) for of, level in zip(self._odds, levels, strict=True))
        kind = EVEN_ODDS + round(CLASSES_PER_OCTAVE * math.log2(odds))
        visit.kind = min(max(kind, 0), NUM_CLASSES - 1)
        visit.number, visit.ended_s = self._count, now
        self._levels[:, place], self._pages[place] = levels, max(1, own_pages)
        self._ended_s[place], self._waited_s[place] = now, math.nan
        self._count += 1

    def rate(self, kind: int, age_s: float) -> float:
        """The highest rate of returns per second that a prefix of a class of odds can expect."""
        age = bisect(_STARTS_S, max(age_s, 0.0)) - 1
        return _ODDS_OF_CLASS[kind] * self._rates[age]

    def _fit(self, now: float) -> None:
        seen = slice(min(self._count, MAX_VISITS))
        pages, waited_s, levels = self._pages[seen], self._waited_s[seen], self._levels[:, seen]
        has_returned = ~np.isnan(waited_s)
        waited_s = np.where(has_returned, waited_s, now - self._ended_s[seen])
        returns = pages * has_returned
        weights = pages.copy()
        for odds, level in zip(self._odds, levels, strict=True):
            weights *= odds[level]
        expected = self._fit_baseline(np.maximum(waited_s, 0.0), weights, returns)
        prior = PRIOR_VISITS * pages.mean()
        for _ in range(_FITTING_ROUNDS):
            for odds, level in zip(self._odds, levels, strict=True):
                by_others = np.bincount(level, expected, len(odds)) / odds
                fitted = (np.bincount(level, returns, len(odds)) + prior) / (by_others + prior)
                expected *= (fitted / odds)[level]
                odds[:] = fitted

    def _fit_baseline(self, waited_s: _Floats, pages: _Floats, returns: _Floats) -> _Floats:
        """Learn the baseline; returns the pages of each visit of which it expects the return in the
        time that the visit has waited."""
        spent_s = pages[:, None] * np.clip(waited_s[:, None] - _STARTS_S, 0, _WIDTHS_S)
        at = np.searchsorted(_STARTS_S, waited_s, "right") - 1
        returned, waited = np.bincount(at, returns, len(_STARTS_S)), spent_s.sum(axis=0) + _WIDTHS_S
        ages = range(len(_STARTS_S))
        self._rates = [float((returned[n:].cumsum() / waited[n:].cumsum()).max()) for n in ages]
        expected: _Floats = spent_s @ (returned / waited)
        return expected


def _levels(visit: Visit, num_output: int) -> list[int]:
    pause = 0 if visit.pause_s is None else 1 + int(visit.pause_s / 2).bit_length() // 2
    levels = (visit.turn - 1).bit_length(), num_output.bit_length(), pause
    return [min(level, count - 1) for level, count in zip(levels, _NUM_LEVELS, strict=True)]
