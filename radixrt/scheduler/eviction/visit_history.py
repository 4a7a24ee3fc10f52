"""Who has been here, and how many turns ago did that begin? The last use of every watched page.

It reaches further back than the pool: that a page returned after it was evicted is what a policy has to learn.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from radixrt.scheduler.eviction.return_hazards import ReturnHazards, turn_class

GOES_ON_FROM = 0.5
"""A request is the next turn of another if it shares more than this share of the other's pages. Who shares less has
only the beginning in common, a system prompt."""


@dataclass(eq=False, slots=True)
class Visit:
    """One request."""

    time_s: float
    turns: int
    pages: list[int]
    """Hashes of its watched pages."""
    num_latest: int
    """Of those, how many nobody has used since."""


class VisitHistory:
    """The last visit of each of up to ``max_pages`` pages; teaches ``hazards`` what it sees."""

    def __init__(self, max_pages: int, hazards: ReturnHazards) -> None:
        self._max_pages = max_pages
        self._hazards = hazards
        self._last: dict[int, Visit] = {}
        self._visits: deque[Visit] = deque()

    def record(self, pages: list[int], now: float) -> Visit:
        """Note a request; counts its turns."""
        found = self._found(pages)
        visit = Visit(now, self._turns_before(found) + 1, pages, len(pages))
        if visit.turns > 1:
            before = found[-1]
            returned = sum(other is before for other in found)
            self._hazards.observe_return(turn_class(before.turns), now - before.time_s, returned)
            before.num_latest -= returned
        for other in found:
            if visit.turns == 1 or other is not before:
                other.num_latest -= 1  # a shared beginning: says nothing about who comes back
                self._hazards.observe_wait(turn_class(other.turns), now - other.time_s, 1)
        for page in pages:
            self._last[page] = visit
        self._visits.append(visit)
        self._forget_oldest(now)
        return visit

    def watched(self, now: float) -> Iterator[tuple[int, float, int]]:
        """Class, age and number of the pages that wait for their return."""
        for visit in self._visits:
            if visit.num_latest:
                yield turn_class(visit.turns), now - visit.time_s, visit.num_latest

    def _found(self, pages: list[int]) -> list[Visit]:
        found = []
        for page in pages:
            visit = self._last.get(page)
            if visit is None:
                break
            found.append(visit)
        return found

    def _turns_before(self, found: list[Visit]) -> int:
        goes_on = bool(found) and len(found) > GOES_ON_FROM * len(found[-1].pages)
        return found[-1].turns if goes_on else 0

    def _forget_oldest(self, now: float) -> None:
        while len(self._last) > self._max_pages:
            visit = self._visits.popleft()
            for page in visit.pages:
                if self._last[page] is visit:
                    del self._last[page]
            if visit.num_latest:
                kind = turn_class(visit.turns)
                self._hazards.observe_wait(kind, now - visit.time_s, visit.num_latest)
