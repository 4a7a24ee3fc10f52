"""Who has been here, how many turns ago did that begin, and who came back? The last use of every watched page.

It reaches further back than the pool: that a page returned after it was evicted is what a policy has to learn.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from radixrt.scheduler.radix.eviction.return_hazards import (
    NUM_LEVELS,
    Features,
    Observations,
    features_of,
)

GOES_ON_FROM = 0.5
"""A request is the next turn of another if it shares more than this share of the other's pages. Who shares less has
only the beginning in common, a system prompt, which says nothing about who comes back."""

MAX_VISITS = 4096
"""More would make a fit take longer than a few milliseconds."""

NO_ROW = -1


@dataclass(eq=False, slots=True)
class Visit:
    """One request."""

    pages: list[int]
    """Hashes of its watched pages."""
    num_prompt: int
    """Tokens."""
    turns: int = 1
    """How many requests it is the last of, each going on from the one before."""
    pause_s: float | None = None
    """From the end of the turn before to this one."""
    num_output: int | None = None
    """Tokens of the answer, once it is complete."""
    ended_s: float | None = None
    row: int = NO_ROW
    """Where the ledger keeps what became of it."""

    @property
    def features(self) -> Features:
        return features_of(self.turns, self.pause_s, self.num_prompt, self.num_output)


class VisitHistory:
    """The last visit of each of up to ``max_pages`` pages, and what became of the last ``MAX_VISITS`` visits."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._last: dict[int, Visit] = {}
        self._visits: deque[Visit] = deque()
        self._ledger = _Ledger()

    def begin(self, pages: list[int], num_prompt: int, now: float) -> Visit:
        """Note a request; counts its turns. One without watched pages counts as a stranger and teaches nothing."""
        visit, before = Visit(pages, num_prompt), self._turn_before(pages)
        if not pages:
            return visit
        if before is not None:
            visit.turns = before.turns + 1
            visit.pause_s = 0.0 if before.ended_s is None else now - before.ended_s
            self._ledger.note_return(before.row, visit.pause_s)
        for page in pages:
            self._last[page] = visit
        self._visits.append(visit)
        while len(self._last) > self._max_pages or len(self._visits) > MAX_VISITS:
            self._forget_oldest()
        visit.row = self._ledger.add(len(pages))
        return visit

    def end(self, visit: Visit, num_output: int, now: float) -> None:
        """The answer is complete."""
        visit.num_output, visit.ended_s = num_output, now
        self._ledger.note_end(visit.row, visit.features, now)

    def observations(self, now: float) -> Observations | None:
        """What became of the visits that have ended; None if none has."""
        return self._ledger.observations(now)

    def _turn_before(self, pages: list[int]) -> Visit | None:
        latest, num_found = None, 0
        for page in pages:
            visit = self._last.get(page)
            if visit is None:
                break
            latest, num_found = visit, num_found + 1
        if latest is None or num_found <= GOES_ON_FROM * len(latest.pages):
            return None
        return latest

    def _forget_oldest(self) -> None:
        visit = self._visits.popleft()
        for page in visit.pages:
            if self._last[page] is visit:
                del self._last[page]
        self._ledger.remove(visit.row)
        visit.row = NO_ROW


class _Ledger:
    """A row a visit, in columns, so that a fit of thousands of them is a few array operations."""

    def __init__(self) -> None:
        self._next = 0
        self._features = np.zeros((MAX_VISITS, len(NUM_LEVELS)), dtype=np.intp)
        self._num_pages = np.zeros(MAX_VISITS)
        self._ended_s = np.full(MAX_VISITS, np.nan)
        """NaN: not yet, or the row is free."""
        self._waited_s = np.full(MAX_VISITS, np.nan)
        """NaN: has not returned yet."""

    def add(self, num_pages: int) -> int:
        """A new visit; the row of the one ``MAX_VISITS`` before has to be free."""
        row, self._next = self._next, (self._next + 1) % MAX_VISITS
        self._num_pages[row] = num_pages
        self._ended_s[row] = self._waited_s[row] = np.nan
        return row

    def note_end(self, row: int, features: Features, now: float) -> None:
        if row != NO_ROW:
            self._features[row] = features
            self._ended_s[row] = now

    def note_return(self, row: int, waited_s: float) -> None:
        if row != NO_ROW:
            self._waited_s[row] = waited_s

    def remove(self, row: int) -> None:
        if row != NO_ROW:
            self._ended_s[row] = np.nan

    def observations(self, now: float) -> Observations | None:
        rows = np.flatnonzero(~np.isnan(self._ended_s))
        if not len(rows):
            return None
        waited = self._waited_s[rows]
        returned = ~np.isnan(waited)
        waited = np.where(returned, waited, now - self._ended_s[rows])
        return Observations(self._features[rows], self._num_pages[rows], waited, returned)
