"""One engine of a replay: a real scheduler with a worker without a model, on a virtual clock, one
step in flight at a time.

The time model has two constants: prompts are computed at a fixed rate, and a decode step adds a
fixed time for one token of each decoding sequence. It does not predict a real device. It gives
queues and pauses of a plausible length, which are the same for all compared policies.
"""

import atexit
import math
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from radixrt.kv.store.directory import CacheDirectory, fingerprint_of
from radixrt.messages.ids import num_ids, pack_ids
from radixrt.messages.moves import PagesRead, PagesWritten, ReadPages, SavePages
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.messages.steps import StepPlan, StepResult
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.kv_events import EventRecorder, EventStream
from radixrt.scheduler.scheduler import Scheduler

END_OF_ANSWER = 2**31 - 1
FIRST_ANSWER_TOKEN = 2**30
"""Simulated answers count up from here: no prompt continues them."""


@dataclass(frozen=True)
class ServiceModel:
    """Rates of the simulated device."""

    prefill_tokens_per_s: float = 100_000.0
    decode_step_s: float = 0.01
    """Duration of a step with one token for each running sequence."""
    tokens_per_symbol: int = 8
    """Tokens that stand behind each simulated one, see :mod:`radixrt.bench.cache.replay`."""

    def step_seconds(self, prefill_symbols: int, num_decoding: int) -> float:
        prefill_s = prefill_symbols * self.tokens_per_symbol / self.prefill_tokens_per_s
        return prefill_s + (self.decode_step_s * self.tokens_per_symbol if num_decoding else 0.0)


class VirtualClock:
    """Seconds since the trace began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedWorker:
    """Executes step plans: samples tokens, and ends every answer at its recorded length."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Symbols that the prompt in a slot has in all."""
        self._decoding: dict[int, None] = {}
        self._left: dict[int, int] = {}
        """Symbols that the answer in a slot will still get."""
        self._next_symbol = FIRST_ANSWER_TOKEN

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def begin(self, plan: StepPlan, answer_lengths: dict[int, int]) -> int:
        """Take in a plan; returns the prompt symbols that it computes.

        Args:
            answer_lengths: symbols still to come, for each slot that the plan admits.
        """
        for slot in plan.release:
            self._decoding.pop(slot, None)
        for admit in plan.admit:
            self._known[admit.slot] = num_ids(admit.token_ids)
            self._left[admit.slot] = answer_lengths[admit.slot]
        return sum(chunk.num_tokens for chunk in plan.prefill)

    def finish(self, plan: StepPlan, step_s: float = 0.0) -> StepResult:
        """The step's tokens."""
        for chunk in plan.prefill:
            if chunk.start + chunk.num_tokens == self._known[chunk.slot]:
                self._decoding[chunk.slot] = None
        slots = list(self._decoding)
        symbols = list(range(self._next_symbol, self._next_symbol + len(slots)))
        self._next_symbol = FIRST_ANSWER_TOKEN + (self._next_symbol + len(slots)) % 2**29
        for i, slot in enumerate(slots):
            self._left[slot] -= 1
            if self._left[slot] == 0:
                symbols[i] = END_OF_ANSWER
        return StepResult(
            step_id=plan.step_id, slots=pack_ids(slots), token_ids=pack_ids(symbols), step_s=step_s
        )


@dataclass(frozen=True)
class DiskModel:
    """A disk for pages that leave memory."""

    tokens: int = 0
    """That it holds; 0: there is none."""
    tokens_per_s: float = 1e6
    """Read or written in a second, one after the other."""
    min_chance: float | None = None
    """See :class:`radixrt.scheduler.disk.returns.Returns`; None: the default. 0 writes all pages."""


NO_DISK = DiskModel()


def _disk_pages(limits: SchedulerLimits, disk: DiskModel, tokens_per_symbol: int) -> DiskPages:
    """Pages on a simulated disk, with a real journal in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="radixrt-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parts = {"weights": "none: a replay"}
    num_slots = disk.tokens // (limits.page_size * tokens_per_symbol)
    pages = DiskPages(
        CacheDirectory.own(folder, parts),
        fingerprint_of(parts),
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        slot_bytes=1,
        quota_bytes=num_slots + (1 << 30),
        share=num_slots / (num_slots + (1 << 30)),
    )
    pages.ids_are_tokens = False
    if disk.min_chance is not None:
        pages.min_chance = disk.min_chance
    return pages


class SimulatedDisk:
    """Answers orders to move pages, one at a time."""

    def __init__(self, clock: VirtualClock, seconds_per_page: float) -> None:
        self._clock, self._seconds_per_page = clock, seconds_per_page
        self._answers: deque[tuple[float, PagesWritten | PagesRead]] = deque()
        self._free_at = 0.0
        self.written_pages = 0

    @property
    def next_at(self) -> float:
        """Time of the next answer; infinity: there is none."""
        return self._answers[0][0] if self._answers else math.inf

    def take(self, order: object) -> None:
        answer: PagesWritten | PagesRead
        match order:
            case SavePages():
                count = num_ids(order.slots)
                self.written_pages += count
                answer = PagesWritten(slots=order.slots, checksums=bytes(16 * count))
            case ReadPages():
                count = num_ids(order.slots)
                seconds = count * self._seconds_per_page
                answer = PagesRead(number=order.number, num_pages=count, seconds=seconds)
            case _:
                return
        self._free_at = max(self._free_at, self._clock.now) + count * self._seconds_per_page
        self._answers.append((self._free_at, answer))

    def due(self) -> Iterator[PagesWritten | PagesRead]:
        """The answers whose time has come."""
        while self.next_at <= self._clock.now:
            yield self._answers.popleft()[1]


class SimulatedEngine:
    """Requests that come during a step are queued when it ends.

    Args:
        symbols_left: symbols that the answer of a sequence will still get, by its id and those that
            it has.
        is_routed: a router wants to know the load, and the changes of the cache.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        clock: VirtualClock,
        service: ServiceModel,
        symbols_left: Callable[[int, int], int],
        *,
        is_routed: bool,
        disk: DiskModel = NO_DISK,
    ) -> None:
        pages = _disk_pages(limits, disk, service.tokens_per_symbol) if disk.tokens else None
        self.scheduler = Scheduler(limits, clock, pages)
        tokens_per_page = limits.page_size * service.tokens_per_symbol
        self.disk = SimulatedDisk(clock, tokens_per_page / disk.tokens_per_s)
        self._admitted: list[int] = []
        self.prefill_symbols = 0
        """Computed so far."""
        self.received = 0
        self.ends_at = math.inf
        """Time at which the step in flight ends; infinity: there is none."""
        self._stream: EventStream | None = None
        self._clock, self._service, self._symbols_left = clock, service, symbols_left
        self._worker = SimulatedWorker()
        self._inbox: list[SequenceRequest] = []
        self._plan: StepPlan | None = None
        self._step_s = 0.0
        if is_routed:
            tree = self.scheduler.state.kv.tree
            recorder = EventRecorder(limits.num_pages, limits.page_size, with_token_ids=False)
            tree.observers = (recorder,)
            self._stream = EventStream(recorder, max_batches=1)

    def receive(self, request: SequenceRequest) -> None:
        self._inbox.append(request)

    def start_step(self) -> bool:
        """Queue the requests and start a step, unless one is in flight or there is nothing to
        compute; True: it started."""
        if self._plan is not None:
            return False
        for request in self._inbox:
            self.scheduler.add(request)
        self.received += len(self._inbox)
        self._inbox.clear()
        for answer in self.disk.due():
            self.scheduler.moved(answer)
        plan = self._plan = self.scheduler.plan()
        for move in self.scheduler.take_moves():
            self.disk.take(move)
        if plan is None:
            self.ends_at = self.disk.next_at
            return False
        prefill_symbols = self._worker.begin(plan, self._answer_lengths(plan))
        self.prefill_symbols += prefill_symbols
        self._step_s = self._service.step_seconds(prefill_symbols, self._worker.num_decoding)
        self.ends_at = self._clock.now + self._step_s
        return True

    def end_step(self) -> TokenBatch:
        """The tokens of the step in flight; none if only the disk has answered."""
        if self._plan is None:
            self.ends_at = math.inf
            return TokenBatch()
        is_timed = self._stream is not None or self.scheduler.state.kv.disk is not None
        step_s = self._step_s if is_timed else 0.0
        result = self._worker.finish(self._plan, step_s)
        self._plan, self.ends_at = None, math.inf
        return self.scheduler.absorb(result)

    def next_events(self) -> bytes | None:
        """The encoded changes of the cache since the last call; None if there are none."""
        assert self._stream is not None
        return self._stream.next_batch()

    def take_admitted(self) -> list[int]:
        """Sequences that were admitted since the last call, in their order; a retracted one comes
        again."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _answer_lengths(self, plan: StepPlan) -> dict[int, int]:
        """Lengths of the answers to the sequences just admitted, by slot."""
        lengths = {}
        for admit in plan.admit:
            sequence = self.scheduler.state.slots.sequences[admit.slot]
            assert sequence is not None
            self._admitted.append(sequence.seq_id)
            lengths[admit.slot] = self._symbols_left(sequence.seq_id, sequence.num_output)
        return lengths
