"""Fills the bitmask rows of matchers in threads, so that a slow one delays no other.

A mask takes some 40 µs. It may take 80 ms where a library builds the states of its lexer only then. Nobody knows before
which it will be, so all of them are filled in threads; the libraries release Python's lock meanwhile.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.matcher import Matcher

log = logging.getLogger(__name__)

SLOW_S = 0.001
"""A mask that took longer lets the next ones of its sequence count as slow."""

_THREADS = min(4, os.cpu_count() or 1)
"""Fill the rows that are expected to be quick."""
_MOST_THREADS = 64
"""Each row that is slow has one of its own."""
_STUCK_S = 0.0005
"""After this time without an end, one more thread takes the rows that no thread has begun."""


class MaskJob:
    """One row to be filled. Neither the matcher nor the row may be used until it is done."""

    __slots__ = ("cpu_s", "expected_slow", "failed", "is_done", "matcher", "row")

    def __init__(self, matcher: Matcher, row: BitmaskRow, *, expected_slow: bool) -> None:
        self.matcher = matcher
        self.row = row
        self.expected_slow = expected_slow
        self.is_done = False
        self.failed = False
        """The matcher can't go on; the row is not filled."""
        self.cpu_s = 0.0

    def run(self) -> None:
        begin = time.thread_time()
        try:
            self.matcher.fill_mask(self.row)
        except GrammarExhausted as error:
            log.warning("Matcher failed: %s", error)
            self.failed = True
        except Exception:
            log.exception("A mask could not be filled.")
            self.failed = True
        self.cpu_s = time.thread_time() - begin


class MaskFiller:
    """Threads that fill rows. One thread gives the jobs and waits for them: the worker's."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MOST_THREADS, "fill-mask")
        self._queue: deque[MaskJob] = deque()
        self._changed = threading.Condition()
        self._to_come = 0
        """Jobs that must be done before the waiting thread is woken."""

    def begin(self, jobs: Sequence[MaskJob]) -> None:
        """Begin to fill these rows; those expected to be slow come last, with a thread for each."""
        quick = [job for job in jobs if not job.expected_slow]
        self._queue.extend(quick)
        self._queue.extend(job for job in jobs if job.expected_slow)
        for _ in range(min(len(quick), _THREADS) + len(jobs) - len(quick)):
            self._pool.submit(self._drain)

    def wait(
        self, jobs: Sequence[MaskJob], seconds: float | None = None, *, count: int = 0
    ) -> None:
        """Wait until jobs are done, at most some seconds.

        Args:
            jobs: that were begun.
            seconds: None: as long as it takes.
            count: of the jobs, how many must be done; 0: all.
        """
        deadline = None if seconds is None else time.perf_counter() + seconds
        with self._changed:
            done = sum(job.is_done for job in jobs)
            self._to_come = (count or len(jobs)) - done
            while self._to_come > 0:
                left = _STUCK_S if deadline is None else deadline - time.perf_counter()
                if left <= 0:
                    return
                woken = self._changed.wait(min(left, _STUCK_S) if self._queue else left)
                self._to_come = (count or len(jobs)) - sum(job.is_done for job in jobs)
                if not woken and self._queue:
                    self._pool.submit(self._drain)

    def _drain(self) -> None:
        while True:
            try:
                job = self._queue.popleft()
            except IndexError:
                return
            job.run()
            with self._changed:
                job.is_done = True
                self._to_come -= 1
                if self._to_come <= 0:
                    self._changed.notify()
