"""Who has been here, how many turns ago did that begin, and who came back? The last use of every watched page.

It reaches further back than the pool: that a page returned after it was evicted is what a policy has to learn.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from radixrt.scheduler.eviction.return_hazards import (
    NUM_LEVELS,
    Features,
    Observations,
    features_of,
)

GOES_ON_FROM = 0.5
"""A request is the next turn of another if it shares more than this share of the other's pages. Who shares less has
only the beginning in common, a system prompt, which says nothing about who comes back."""

MAX_VISITS = 4096
"""More would make a fit take longer than ten milliseconds."""


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
    waited_s: float | None = None
    """From its end to the next turn, once that has come."""

    @property
    def features(self) -> Features:
        return features_of(self.turns, self.pause_s, self.num_prompt, self.num_output)


class VisitHistory:
    """The last visit of each of up to ``max_pages`` pages, and what became of the last ``MAX_VISITS`` visits."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._last: dict[int, Visit] = {}
        self._visits: deque[Visit] = deque()

    def begin(self, pages: list[int], num_prompt: int, now: float) -> Visit:
        """Note a request; counts its turns. One without watched pages counts as a stranger and teaches nothing."""
        visit, before = Visit(pages, num_prompt), self._turn_before(pages)
        if not pages:
            return visit
        if before is not None:
            visit.turns = before.turns + 1
            visit.pause_s = 0.0 if before.ended_s is None else now - before.ended_s
            before.waited_s = visit.pause_s
        for page in pages:
            self._last[page] = visit
        self._visits.append(visit)
        while len(self._last) > self._max_pages or len(self._visits) > MAX_VISITS:
            self._forget_oldest()
        return visit

    def end(self, visit: Visit, num_output: int, now: float) -> None:
        """The answer is complete."""
        visit.num_output, visit.ended_s = num_output, now

    def observations(self, now: float) -> Observations | None:
        """What became of the visits that have ended; None if none has."""
        ended = [visit for visit in self._visits if visit.ended_s is not None]
        if not ended:
            return None
        waited = [v.waited_s if v.waited_s is not None else now - (v.ended_s or 0.0) for v in ended]
        return Observations(
            np.array([v.features for v in ended], dtype=np.intp).reshape(-1, len(NUM_LEVELS)),
            np.array([len(v.pages) for v in ended], dtype=np.float64),
            np.array(waited, dtype=np.float64),
            np.array([v.waited_s is not None for v in ended]),
        )

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
