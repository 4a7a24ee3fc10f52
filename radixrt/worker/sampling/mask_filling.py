"""Fills the bitmask rows of matchers in threads, so that a slow one delays no other.

A mask takes some 40 µs. It may take 80 ms where a library builds the states of its lexer only then.
Nobody knows before which it will be, so all of them are filled in threads; the libraries release
Python's lock meanwhile.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from radixrt.base.liveness.supervision import start_thread
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.matcher import Matcher

log = logging.getLogger(__name__)

SLOW_S = 0.001
"""A mask that took longer lets the next ones of its sequence count as slow."""

_THREADS = min(4, os.cpu_count() or 1)
"""Fill the rows that are expected to be quick."""
_MAX_THREADS = 64
"""Each row that is slow has one of its own."""
_STUCK_S = 0.0005
"""After this time without an end, one more thread takes the rows that no thread has begun."""
_IDLE_S = 10.0
"""A thread without a row for this time ends."""


@dataclass(slots=True, eq=False)
class MaskJob:
    """One row to be filled, and one behind each token of a draft. Neither the matcher nor the rows
    may be used until it is done."""

    matcher: Matcher
    row: BitmaskRow
    _: KW_ONLY
    expected_slow: bool
    draft: Sequence[int] = ()
    """Tokens that may follow."""
    catch_up: Callable[[], bool] | None = None
    """Lets the matcher take what it has not taken yet, and returns whether that is allowed; None:
    it has taken all."""
    forced: list[int] = field(default_factory=list)
    """The tokens that must come next; only found if there was something to catch up."""
    draft_rows: list[BitmaskRow] = field(default_factory=list)
    """The rows behind the draft that could be filled, from its first token on."""
    is_done: bool = False
    failed: bool = False
    """The matcher can't go on; the row is not filled."""
    cpu_s: float = 0.0

    def run(self) -> None:
        begin = time.thread_time()
        try:
            if self.catch_up is not None and not self.catch_up():
                self.failed = True
                return
            self.matcher.fill_mask(self.row)
            if self.catch_up is not None:
                self.forced = self.matcher.forced_tokens()
            self._fill_draft_rows()
        except GrammarExhausted as error:
            log.warning("Matcher failed: %s", error)
            self.failed = True
        except BaseException:  # a panic of a library in Rust is no Exception
            log.exception("A mask could not be filled.")
            self.failed = True
        self.cpu_s = time.thread_time() - begin

    def _fill_draft_rows(self) -> None:
        """Let the matcher take the draft, fill a row behind each token, and give them back."""
        num_taken = 0
        try:
            for token in self.draft:
                if self.matcher.advance([token]) == 0:
                    break
                num_taken += 1
                row = np.empty_like(self.row)
                self.matcher.fill_mask(row)
                self.draft_rows.append(row)
        except GrammarExhausted as error:
            log.debug("A draft exhausted its grammar: %s", error)
        finally:
            self.matcher.rollback(num_taken)


class MaskFiller:
    """Threads that fill rows. One thread gives the jobs and waits for them: the worker's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[MaskJob] = deque()
        self.num_threads = 0
        self._idle: list[threading.Lock] = []
        """One for each thread without a row, which waits for its release; the last to have become
        idle comes last."""
        self._waking = 0
        """Threads that were released or started, and have not looked for a row since."""
        self._to_come = 0
        """Jobs that must be done before the waiting thread is woken."""

    def begin(self, jobs: Sequence[MaskJob]) -> None:
        """Begin to fill these rows; those expected to be slow come last, with a thread for each."""
        quick = [job for job in jobs if not job.expected_slow]
        with self._lock:
            self._queue.extend(quick)
            self._queue.extend(job for job in jobs if job.expected_slow)
            self._engage(min(len(quick), _THREADS) + len(jobs) - len(quick))

    def wait(
        self, jobs: Sequence[MaskJob], seconds: float | None = None, *, count: int = 0
    ) -> None:
        """Wait until jobs are done, at most some seconds.

        Args:
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
                    self._engage(1)

    def _engage(self, count: int) -> None:
        """Let this number of threads look for rows that did not do so already: idle ones, else new
        ones."""
        for _ in range(count - self._waking):
            if self._idle:
                self._idle.pop().release()
            elif self.num_threads < _MAX_THREADS:
                self.num_threads += 1
                start_thread(self._fill, name="fill-mask")
            else:
                return
            self._waking += 1

    def _fill(self) -> None:
        """The body of a thread."""
        idle, job = threading.Lock(), None
        idle.acquire()
        while (job := self._next(job, idle)) is not None:
            job.run()

    def _next(self, done: MaskJob | None, idle: threading.Lock) -> MaskJob | None:
        """The next row after one that is done; None if there was none for a while. The thread is
        idle as soon as its row counts as done, so that the next step does not start another."""
        with self._lock:
            if done is None:
                self._waking -= 1
            else:
                done.is_done = True
                self._to_come -= 1
                if self._to_come <= 0:
                    self._changed.notify()
            while not self._queue:
                self._idle.append(idle)
                self._lock.release()
                in_time = idle.acquire(timeout=_IDLE_S)
                self._lock.acquire()
                if idle in self._idle:
                    self._idle.remove(idle)
                    self.num_threads -= 1
                    return None
                if not in_time:  # it was released meanwhile
                    idle.acquire()
                self._waking -= 1
            return self._queue.popleft()
