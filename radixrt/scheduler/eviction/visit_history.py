"""Who has been here, and how many turns ago did that begin? The last use of every watched page.

It reaches further back than the pool: that a page returned after it was evicted is what a policy has to learn.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from radixrt.scheduler.eviction.return_hazards import ReturnHazards, classify

GOES_ON_FROM = 0.5
"""A request is the next turn of another if it shares more than this share of the other's pages. Who shares less has
only the beginning in common, a system prompt."""

MEDIAN_STEP = 1.02
"""By what the running median of pauses between turns moves towards each new one."""

MOST_LISTED = 2
"""Pages that visits may list for each that is remembered; beyond it they are cleared of those used again later."""


@dataclass(eq=False, slots=True)
class Visit:
    """One request."""

    time_s: float
    turns: int
    """How many requests it is the last of, each going on from the one before."""
    kind: int
    """Its class; see :func:`radixrt.scheduler.eviction.return_hazards.classify`."""
    pages: list[int]
    """Hashes of its watched pages; some of those used again since may be missing."""
    num_pages: int
    """How many watched pages it had."""
    num_latest: int
    """Of those, how many nobody has used since."""


class VisitHistory:
    """The last visit of each of up to ``max_pages`` pages; teaches ``hazards`` what it sees."""

    def __init__(self, max_pages: int, hazards: ReturnHazards) -> None:
        self._max_pages = max_pages
        self._hazards = hazards
        self._last: dict[int, Visit] = {}
        self._visits: deque[Visit] = deque()
        self._num_listed = 0
        """Pages on all visits, with those that were used again later."""
        self._median_pause_s = 30.0

    def record(self, pages: list[int], now: float) -> Visit:
        """Note a request; counts its turns."""
        found = self._found(pages)
        before = self._turn_before(found)
        visit = self._visit(pages, before, now)
        for other, num_pages in Counter(found).items():
            other.num_latest -= num_pages
            if other is before:
                self._hazards.observe_return(other.kind, now - other.time_s, num_pages)
            else:  # a shared beginning: says nothing about who comes back
                self._hazards.observe_wait(other.kind, now - other.time_s, num_pages)
        for page in pages:
            self._last[page] = visit
        self._visits.append(visit)
        self._num_listed += len(pages)
        if self._num_listed > MOST_LISTED * self._max_pages + len(pages):
            self._drop_outdated()
        self._forget_oldest(now)
        return visit

    def watched(self, now: float) -> Iterator[tuple[int, float, int]]:
        """Class, age and number of the pages that wait for their return."""
        for visit in self._visits:
            if visit.num_latest:
                yield visit.kind, now - visit.time_s, visit.num_latest

    def _found(self, pages: list[int]) -> list[Visit]:
        found = []
        for page in pages:
            visit = self._last.get(page)
            if visit is None:
                break
            found.append(visit)
        return found

    def _turn_before(self, found: list[Visit]) -> Visit | None:
        goes_on = bool(found) and len(found) > GOES_ON_FROM * found[-1].num_pages
        return found[-1] if goes_on else None

    def _visit(self, pages: list[int], before: Visit | None, now: float) -> Visit:
        if before is None:
            return Visit(now, 1, classify(1, was_quick=False), pages, len(pages), len(pages))
        pause_s = now - before.time_s
        was_quick = pause_s < self._median_pause_s
        self._median_pause_s *= 1 / MEDIAN_STEP if was_quick else MEDIAN_STEP
        turns = before.turns + 1
        kind = classify(turns, was_quick=was_quick)
        return Visit(now, turns, kind, pages, len(pages), len(pages))

    def _drop_outdated(self) -> None:
        """Where the same prompts come again and again, no page is forgotten, and their visits would never be."""
        self._visits = deque(visit for visit in self._visits if visit.num_latest)
        for visit in self._visits:
            visit.pages = [page for page in visit.pages if self._last[page] is visit]
        self._num_listed = len(self._last)

    def _forget_oldest(self, now: float) -> None:
        while len(self._last) > self._max_pages:
            visit = self._visits.popleft()
            self._num_listed -= len(visit.pages)
            for page in visit.pages:
                if self._last[page] is visit:
                    del self._last[page]
            if visit.num_latest:
                self._hazards.observe_wait(visit.kind, now - visit.time_s, visit.num_latest)
