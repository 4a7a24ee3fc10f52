"""Admits the runs of a batch in the order of common prefixes, within the limits of concurrency and
KV cache.

A program runs until it has a first call to send, and waits here. Runs that make one call after
another need the KV of their earlier calls. If more of them are active than the cache holds, they
evict each other's KV, and every call computes its whole prompt again. The server cannot prevent
this, because it does not know the future requests. So a run is admitted only while the KV that the
active runs are expected to compute fits in the cache. If a run becomes inactive, for example in a
slow tool, the next run is admitted even if the cache is full: serial waits for tools would cost
more than prefixes that are computed again.
"""

import asyncio
import bisect
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.backends.protocol import Backend, Prompt
from radixrt.lang.runtime.placeholder import BACKGROUND
from radixrt.lang.tracing.records import CallRecord

SETTLING_S = 0.02
"""The longest time that the batch waits, once, for first calls to put in order."""
RESTING_S = 0.03
"""This long after its last answer, a run without a call counts as inactive; programs take a moment
between calls."""
USED_SHARE = 0.9
"""Share of the cache that a batch uses: pages are filled in part, and other clients may be
there."""
TOKENS_PER_CHARACTER = 0.35
GROWTH = 1.5
"""Until a run has ended, a run is expected to compute this many times the tokens of its first
prompt."""


@dataclass
class PrefixOrder:
    """Prompts that wait, each under a key, ordered so that long common prefixes follow one another.

    The order is a walk along nearest neighbours: it begins with the two prompts that share the
    longest prefix, and goes on with the prompt that shares most with the last one.
    """

    _waiting: list[tuple[str, int, str]] = field(default_factory=list)
    """Prompt, number and key; sorted, so that neighbours share the longest prefixes."""
    _last: str | None = None
    _num_added: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prompt: str, key: str) -> None:
        bisect.insort(self._waiting, (prompt, self._num_added, key))
        self._num_added += 1

    def remove(self, key: str) -> None:
        """Drop a key; an unknown one is ignored."""
        self._waiting = [entry for entry in self._waiting if entry[2] != key]

    def peek(self) -> str:
        """The key that :meth:`pop` would take.

        Raises:
            IndexError: no prompt waits.
        """
        return self._waiting[self._next()][2]

    def pop(self) -> str:
        """Take the key of the next prompt.

        Raises:
            IndexError: no prompt waits.
        """
        self._last, _, key = self._waiting.pop(self._next())
        return key

    def _next(self) -> int:
        if self._last is None:
            return self._start()
        after = bisect.bisect_left(self._waiting, (self._last,))
        if after in (0, len(self._waiting)):
            return min(after, len(self._waiting) - 1)
        following = common_prefix_length(self._last, self._waiting[after][0])
        preceding = common_prefix_length(self._last, self._waiting[after - 1][0])
        return after if following >= preceding else after - 1

    def _start(self) -> int:
        """The first of the two neighbours that share the longest prefix."""
        shared = [
            common_prefix_length(one[0], other[0])
            for one, other in zip(self._waiting, self._waiting[1:], strict=False)
        ]
        return shared.index(max(shared)) if shared else 0


def as_text(prompt: Prompt) -> str:
    """A text for comparisons: prompts that begin alike have texts that begin alike."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"\0{message['role']}\0{message['content']}" for message in prompt)


@dataclass(eq=False)
class _Run:
    """A run of the batch that has sent a call, or waits to send its first."""

    characters: int
    """Characters of its first prompt."""
    admitted: "asyncio.Future[None]"
    calls: int = 0
    """Calls under way."""
    computed: int = 0
    """Tokens of prompts and answers whose KV its calls have computed."""
    is_active: bool = True
    becomes_inactive: "asyncio.TimerHandle | None" = None


class BatchAdmission:
    """Lives in the background event loop; :meth:`leave` and :meth:`close` may be called from any
    thread."""

    def __init__(self, backend: Backend, num_runs: int, concurrency: int) -> None:
        """
        Args:
            num_runs: runs that reach their first call, or end, without waiting for each other.
            concurrency: most runs that are admitted at a time.
        """
        self._backend = backend
        self._concurrency = concurrency
        self._num_expected = num_runs
        self._all_came = asyncio.Event()
        self._order = PrefixOrder()
        self._waiting: dict[str, _Run] = {}
        self._admitted: dict[str, _Run] = {}
        self._cache_tokens: float | None = None
        """Tokens that the batch may use; None: unknown, and every run fits."""
        self._computed_by_ended: list[int] = []
        """Computed tokens of each run that has ended, if its calls reported them."""
        self._opening: asyncio.Task[None] | None = None
        self._is_open = False

    @contextlib.asynccontextmanager
    async def admission(
        self, run_id: str, prompt: Prompt, record: CallRecord
    ) -> AsyncIterator[None]:
        """Inside the block, a call of a run is under way.

        Args:
            record: of the call; its usage is read at the end of the block.
        """
        if run_id not in self._admitted:
            await asyncio.shield(self._waiting_run(run_id, as_text(prompt)).admitted)
        run = self._admitted[run_id]
        run.calls += 1
        run.is_active = True
        if run.becomes_inactive is not None:
            run.becomes_inactive.cancel()
        try:
            yield
        finally:
            usage = record.usage
            run.calls -= 1
            run.computed += usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
            if not run.calls and run_id in self._admitted:
                loop = asyncio.get_running_loop()
                run.becomes_inactive = loop.call_later(RESTING_S, self._set_inactive, run)

    def leave(self, run_id: str) -> None:
        """A run has ended."""
        BACKGROUND.get().call_soon_threadsafe(self._leave, run_id)

    def close(self) -> None:
        """Admit no further runs."""
        self._concurrency = 0

    def _waiting_run(self, run_id: str, text: str) -> _Run:
        if (run := self._waiting.get(run_id)) is None:
            loop = asyncio.get_running_loop()
            run = self._waiting[run_id] = _Run(len(text), loop.create_future())
            self._order.add(text, run_id)
            self._one_came()
            self._opening = self._opening or asyncio.create_task(self._open())
            self._admit()
        return run

    def _one_came(self) -> None:
        self._num_expected -= 1
        if self._num_expected <= 0:
            self._all_came.set()

    async def _open(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_came.wait(), SETTLING_S)
        cache_tokens = await self._backend.cache_tokens()
        self._cache_tokens = None if cache_tokens is None else cache_tokens * USED_SHARE
        self._is_open = True
        self._admit()

    def _admit(self, places: int = 0) -> None:
        """
        Args:
            places: runs that are admitted without regard to the cache.
        """
        while self._is_open and len(self._order) and len(self._admitted) < self._concurrency:
            if places < 1 and not self._fits(self._waiting[self._order.peek()]):
                return
            places -= 1
            run_id = self._order.pop()
            run = self._admitted[run_id] = self._waiting.pop(run_id)
            run.admitted.set_result(None)

    def _fits(self, run: _Run) -> bool:
        active = [other for other in self._admitted.values() if other.is_active]
        if self._cache_tokens is None or not active:
            return True
        return sum(map(self._expected, [*active, run])) <= self._cache_tokens

    def _expected(self, run: _Run) -> float:
        """Tokens that a run will have computed at its end."""
        ended = self._computed_by_ended
        guess = run.characters * TOKENS_PER_CHARACTER * GROWTH
        return max(run.computed, sum(ended) / len(ended) if ended else guess)

    def _set_inactive(self, run: _Run) -> None:
        run.is_active = False
        self._admit(places=1)

    def _leave(self, run_id: str) -> None:
        if (waiting := self._waiting.pop(run_id, None)) is not None:
            self._order.remove(run_id)
            waiting.admitted.cancel()
        elif (run := self._admitted.pop(run_id, None)) is not None:
            if run.becomes_inactive is not None:
                run.becomes_inactive.cancel()
            if run.computed:
                self._computed_by_ended.append(run.computed)
        else:
            self._one_came()  # it made no call
        self._admit()
