"""When may a run of a batch send its first calls? In the order of what runs share, as many at a time as may and as fit.

Each program runs until it has a first call to send, and waits here. Of what else happens in the runs the gate takes note:
who rests, who has ended, and so which KV the batch needs no more.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from radixrt.lang.backends.protocol import Backend, Prompt, Usage
from radixrt.lang.background import BACKGROUND
from radixrt.lang.batch_order import PrefixOrder
from radixrt.lang.pins import SHORTEST_CHARS, Pins
from radixrt.lang.prefixes import as_text, num_shared
from radixrt.lang.records import CallRecord
from radixrt.lang.releases import Releases
from radixrt.lang.room import Room

SETTLING_S = 0.02
"""How long the batch waits at most, once, for first calls to put in order, before it lets the first ones go."""
RESTING_S = 0.03
"""So long after its last answer a run without a call counts as one that rests; programs take a moment between calls."""


@dataclass
class _Waiting:
    """A run that waits for its turn."""

    first: Prompt
    """What its first call answers; it decides its place in the order."""
    turn: "asyncio.Future[None]"
    prompts: list[str] = field(default_factory=list)
    """Of all its calls that wait, as texts."""


@dataclass
class _Inside:
    """A run that had its turn."""

    first_text: str
    first: Prompt
    """What its first call answers."""
    under_way: int = 0
    """Calls that were sent and have not ended."""
    was_answered: bool = False
    usages: list[Usage] = field(default_factory=list)
    """Of its calls that have ended, and of those of programs that it ran."""
    resting: "asyncio.TimerHandle | None" = None


class BatchGate:
    """Lives in the runtime's event loop, but for :meth:`leave`, :meth:`close` and :meth:`end`. Knows runs by their ids."""

    def __init__(self, backend: Backend, num_runs: int, concurrency: int) -> None:
        """
        Args:
            num_runs: that will come here, or end, without waiting for each other.
            concurrency: most runs inside.
        """
        self._backend = backend
        self._most_inside = concurrency
        self._num_expected = num_runs
        self._all_came = asyncio.Event()
        self._order = PrefixOrder()
        self._waiting: dict[str, _Waiting] = {}
        self._inside: dict[str, _Inside] = {}
        self._room = Room(None)
        self._is_open = False
        self._opening: asyncio.Task[None] | None = None
        self._releases = Releases(backend)
        self._pins = Pins(backend)

    @contextlib.asynccontextmanager
    async def admission(
        self, run_id: str, prompt: Prompt, record: CallRecord
    ) -> AsyncIterator[None]:
        """Inside the block, a call of a run is under way.

        Args:
            record: of the call; its usage is read when the block ends.
        """
        text = as_text(prompt)
        if run_id in self._inside:
            inside = self._inside[run_id]
            self._room.sends(run_id, text, inside.was_answered)
        else:
            await self._turn_of(run_id, prompt, text)
            inside = self._inside[run_id]
        self._calls(run_id, inside)
        try:
            yield
        finally:
            self._answered(run_id, inside, text, record)

    def leave(self, run_id: str) -> None:
        """A run has ended: its place is free. From any thread."""
        BACKGROUND.get().call_soon_threadsafe(self._leave, run_id)

    def close(self) -> None:
        """Let nobody in any more. From any thread."""
        BACKGROUND.get().call_soon_threadsafe(self._close)

    def end(self) -> None:
        """The batch is over: what was held for it is let go of. From any thread."""
        BACKGROUND.submit(self._pins.end()).result()

    # ------------------------------------------------------------ coming in

    async def _turn_of(self, run_id: str, prompt: Prompt, text: str) -> None:
        """Wait until a run may come in."""
        waiting = self._waiting.get(run_id)
        if waiting is None:
            loop = asyncio.get_running_loop()
            waiting = self._waiting[run_id] = _Waiting(prompt, loop.create_future())
            self._order.add(text, run_id)
            self._one_came()
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
            loop.call_soon(self._let_in)  # once all its calls are here
        waiting.prompts.append(text)
        await asyncio.shield(waiting.turn)

    def _one_came(self) -> None:
        self._num_expected -= 1
        if self._num_expected <= 0:
            self._all_came.set()

    async def _open(self) -> None:
        cache_tokens, _ = await asyncio.gather(self._backend.cache_tokens(), self._settled())
        self._room = Room(cache_tokens)
        self._is_open = True
        self._let_in()

    async def _settled(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_came.wait(), SETTLING_S)

    def _let_in(self) -> None:
        while self._is_open and len(self._order) and len(self._inside) < self._most_inside:
            if not self._room.fits(self._waiting[self._order.peek()].prompts):
                return
            run_id = self._order.next_key()
            waiting = self._waiting.pop(run_id)
            self._inside[run_id] = _Inside(waiting.prompts[0], waiting.first)
            self._room.enter(run_id, waiting.prompts)
            self._releases.entered(run_id)
            waiting.turn.set_result(None)

    # ------------------------------------------------------------ inside

    def _calls(self, run_id: str, inside: _Inside) -> None:
        inside.under_way += 1
        if inside.resting is not None:
            inside.resting.cancel()
            inside.resting = None
        if run_id in self._inside:
            self._room.rests(run_id, False)

    def _answered(self, run_id: str, inside: _Inside, text: str, record: CallRecord) -> None:
        inside.under_way -= 1
        inside.usages.append(record.usage)
        if run_id not in self._inside:
            return
        if record.usage.prompt_tokens:
            self._room.answered(text, record.usage)
            self._releases.answered(run_id)
            if not inside.was_answered:
                self._pin_what_is_shared(inside)
        inside.was_answered = True
        if not inside.under_way:
            loop = asyncio.get_running_loop()
            inside.resting = loop.call_later(RESTING_S, self._rests, run_id)

    def _pin_what_is_shared(self, inside: _Inside) -> None:
        """Pin what a run has begun with, as far as the next one will begin with it."""
        nearest = self._order.nearest(inside.first_text)
        if nearest is not None and nearest[1] >= SHORTEST_CHARS:
            other = self._waiting[nearest[0]].first
            prefix = inside.first[: num_shared(inside.first, other)]
            if len(text := as_text(prefix)) >= SHORTEST_CHARS:
                self._pins.hold(prefix, text)

    def _is_needed(self, prefix: str) -> bool:
        """Whether a run that waits or is inside begins with this."""
        nearest = self._order.nearest(prefix)
        if nearest is not None and nearest[1] == len(prefix):
            return True
        return any(inside.first_text.startswith(prefix) for inside in self._inside.values())

    def _rests(self, run_id: str) -> None:
        if run_id in self._inside:
            self._room.rests(run_id, True)
            self._let_in()

    # ------------------------------------------------------------ going

    def _leave(self, run_id: str) -> None:
        inside = self._inside.pop(run_id, None)
        if (waiting := self._waiting.pop(run_id, None)) is not None:
            self._order.remove(run_id)
            waiting.turn.cancel()
        elif inside is None:
            self._one_came()  # it made no call
        elif inside.resting is not None:
            inside.resting.cancel()
        self._room.leave(run_id, [] if inside is None else inside.usages)
        self._releases.ended(run_id)
        self._let_in()
        self._pins.let_go(self._is_needed)

    def _close(self) -> None:
        self._most_inside = 0
