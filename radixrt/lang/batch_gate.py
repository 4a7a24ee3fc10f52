"""When may a run of a batch send its first calls? In the order of what runs share, as many at a time as may and as fit.

Each program runs until it has a first call to send, and waits here. Of what else happens in the runs the gate takes note:
who rests, who has ended, and so which KV the batch needs no more.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from radixrt.lang.backends.protocol import Backend, Prompt
from radixrt.lang.background import BACKGROUND
from radixrt.lang.batch_order import PrefixOrder
from radixrt.lang.pins import SHORTEST_CHARS, Pins
from radixrt.lang.prefixes import as_text, num_shared
from radixrt.lang.records import CallRecord
from radixrt.lang.releases import Releases
from radixrt.lang.room import Room
from radixrt.lang.run_inside import RunInside

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
        self._room = Room(None)
        """The runs inside. How large it is is known when the first of them may enter."""
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
        if run_id in self._room.inside:
            self._room.sends(run_id, text)
        else:
            await self._turn_of(run_id, prompt, text)
        run = self._room.inside[run_id]
        _calls(run)
        try:
            yield
        finally:
            self._answered(run_id, run, text, record)

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
        while self._is_open and len(self._order) and len(self._room.inside) < self._most_inside:
            if not self._room.fits(self._waiting[self._order.peek()].prompts):
                return
            run_id = self._order.next_key()
            waiting = self._waiting.pop(run_id)
            self._room.enter(run_id, RunInside(waiting.first, waiting.prompts))
            self._releases.entered(run_id)
            waiting.turn.set_result(None)

    # ------------------------------------------------------------ inside

    def _answered(self, run_id: str, run: RunInside, text: str, record: CallRecord) -> None:
        run.under_way -= 1
        run.usages.append(record.usage)
        if run_id not in self._room.inside:
            return
        if record.usage.prompt_tokens:
            self._room.answered(text, record.usage)
            self._releases.answered(run_id)
            if not run.was_answered:
                self._pin_what_is_shared(run)
        run.was_answered = True
        if not run.under_way:
            loop = asyncio.get_running_loop()
            run.will_rest = loop.call_later(RESTING_S, self._rests, run)

    def _pin_what_is_shared(self, run: RunInside) -> None:
        """Pin what a run has begun with, as far as the next one will begin with it."""
        nearest = self._order.nearest(run.first_texts[0])
        if nearest is not None and nearest[1] >= SHORTEST_CHARS:
            other = self._waiting[nearest[0]].first
            prefix = run.first[: num_shared(run.first, other)]
            if len(text := as_text(prefix)) >= SHORTEST_CHARS:
                self._pins.hold(prefix, text)

    def _is_needed(self, prefix: str) -> bool:
        """Whether a run that waits or is inside begins with this."""
        nearest = self._order.nearest(prefix)
        if nearest is not None and nearest[1] == len(prefix):
            return True
        inside = self._room.inside.values()
        return any(run.first_texts[0].startswith(prefix) for run in inside)

    def _rests(self, run: RunInside) -> None:
        run.rests = True
        self._let_in()

    # ------------------------------------------------------------ going

    def _leave(self, run_id: str) -> None:
        if (waiting := self._waiting.pop(run_id, None)) is not None:
            self._order.remove(run_id)
            waiting.turn.cancel()
        elif (run := self._room.inside.get(run_id)) is not None:
            if run.will_rest is not None:
                run.will_rest.cancel()
            self._room.leave(run_id)
        else:
            self._one_came()  # it made no call
        self._releases.ended(run_id)
        self._let_in()
        self._pins.let_go(self._is_needed)

    def _close(self) -> None:
        self._most_inside = 0


def _calls(run: RunInside) -> None:
    """A run sends a call."""
    run.under_way += 1
    run.rests = False
    if run.will_rest is not None:
        run.will_rest.cancel()
        run.will_rest = None
