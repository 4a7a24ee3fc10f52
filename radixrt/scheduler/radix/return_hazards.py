"""Learns which prefixes are likely to be used again, for each second that they stay.

The chance that a prefix returns in the next second falls with the time since its last use, as
1 / (age + SHIFT_S), and is larger or smaller by the *odds* of its class (proportional hazards: Cox,
1972). The class is that of the request that used it last: the turn of its conversation, and the length
of its answer. So the odds of a class are the pages of it that have returned, over those that would
have if all classes were alike.
"""

import math

import msgspec
import numpy as np

SHIFT_S = 200.0
"""Younger prefixes are hardly more likely to return in the next second than those of this age."""
NUM_CLASSES = 9
EVEN_ODDS = NUM_CLASSES // 2
"""The class of odds 1; odds are kept in steps of a factor of 2, from 1/16 to 16."""
MAX_VISITS = 4096
"""The visits that are learned from: the last ones."""
FIT_EVERY, FIRST_FIT = 256, 32
"""Visits from one fit to the next, which takes a tenth of a millisecond; at the start an eighth of
those seen."""
PRIOR_VISITS = 5.0
"""Visits that return as often as all do, as which each class begins."""
_TURNS, _LENGTHS = 4, 16
"""Turns and lengths of answers that are told apart, by powers of 2."""
_KEPT, _LEAD = 0.99, 0.05
"""What a duel's score keeps from bet to bet, and the lead, as a share of the stakes, that decides."""


class Visit(msgspec.Struct, gc=False, eq=False):
    """A request, as the last use of a prefix."""

    turn: int = 1
    """Of its conversation."""
    number: int = -1
    """Counts the visits that have ended."""
    num_pages: int = 0
    """Of its whole prefix, like the next ones since it ended."""
    ended_s: float = 0.0
    kind: int = EVEN_ODDS
    """The class of its odds."""
    bet: int = 0
    """1: only the learned order would keep its prefix; -1: only LRU would; 0: neither, or both."""


class ReturnHazards:
    """The odds of each class of requests, and whether evicting by them does better than LRU.

    LRU is hard to beat where memory is ample, and odds may be learned wrongly. Where the two would
    evict different leaves, each bets on the one that it would keep, and a leaf that returns wins.
    (Qureshi et al., 2007, let policies duel in sampled sets of a cache.)
    """

    def __init__(self) -> None:
        self.learned_rules = False
        self._score = self._stakes = 0.0
        self._odds = np.ones(_TURNS * _LENGTHS)
        self._count, self._next_fit = 0, FIRST_FIT
        self._classes = np.zeros(MAX_VISITS, np.intp)
        """A row for each of the last visits, like the columns below."""
        self._pages, self._ended_s, self._waited_s = np.zeros((3, MAX_VISITS))
        """Seconds from its end to its return are NaN as long as there was none."""

    def bet(self, learned_evicts: Visit | None, lru_evicts: Visit | None) -> None:
        """Bet on the last visits of two leaves."""
        for visit, bet in ((learned_evicts, -1), (lru_evicts, 1)):
            if visit is not None:
                visit.bet = bet * (learned_evicts is not lru_evicts)

    def _settle(self, visit: Visit) -> None:
        if visit.bet:
            self._score = _KEPT * self._score + visit.bet * visit.num_pages
            self._stakes = _KEPT * self._stakes + visit.num_pages
            if abs(self._score) > _LEAD * self._stakes:
                self.learned_rules = self._score > 0
            visit.bet = 0

    def begin(self, before: Visit | None, now: float) -> Visit:
        """The visit of a request that begins; ``before``, the turn before it, has returned."""
        if before is None:
            return Visit()
        self._settle(before)
        row = before.number % MAX_VISITS
        if before.number >= self._count - MAX_VISITS and np.isnan(self._waited_s[row]):
            self._waited_s[row] = now - before.ended_s
        return Visit(before.turn + 1)

    def end(self, visit: Visit, num_output: int, num_pages: int, now: float) -> None:
        """A visit ends with so many tokens in its answer."""
        if self._count >= self._next_fit:
            self._next_fit += min(FIT_EVERY, max(FIRST_FIT, self._count // 8))
            self._fit(now)
        turn, length = (visit.turn - 1).bit_length(), num_output.bit_length()
        one = min(turn, _TURNS - 1) * _LENGTHS + min(length, _LENGTHS - 1)
        odds, row = round(math.log2(self._odds[one])), self._count % MAX_VISITS
        visit.kind = min(max(odds + EVEN_ODDS, 0), NUM_CLASSES - 1)
        visit.number, visit.num_pages, visit.ended_s = self._count, max(1, num_pages), now
        self._classes[row], self._pages[row] = one, visit.num_pages
        self._ended_s[row], self._waited_s[row] = now, math.nan
        self._count += 1

    def hazard(self, kind: int, age_s: float) -> float:
        """The chance that a prefix of a class of odds returns in the next second, but for a factor
        that is the same for all."""
        return 2.0 ** (kind - EVEN_ODDS) / (max(age_s, 0.0) + SHIFT_S)

    def _fit(self, now: float) -> None:
        seen = slice(min(self._count, MAX_VISITS))
        pages, waited, classes = self._pages[seen], self._waited_s[seen], self._classes[seen]
        returned = ~np.isnan(waited)
        waited = np.where(returned, waited, now - self._ended_s[seen])
        returns = pages * returned
        expected = pages * np.log1p(np.maximum(waited, 0.0) / SHIFT_S)
        expected *= returns.sum() / max(expected.sum(), 1e-9)
        prior, count = PRIOR_VISITS * pages.mean(), len(self._odds)
        seen_by_class = np.bincount(classes, returns, count)
        self._odds = (seen_by_class + prior) / (np.bincount(classes, expected, count) + prior)
