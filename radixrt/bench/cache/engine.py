"""One engine of a replay: a real scheduler with a worker without a model, on a virtual clock, one
step in flight at a time.

The time model has two constants: prompts are computed at a fixed rate, and a decode step adds a
fixed time for one token of each decoding sequence. It does not predict a real device. It gives
queues and pauses of a plausible length, which are the same for all compared policies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.messages.ids import num_ids, pack_ids
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.messages.steps import StepPlan, StepResult
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
    ) -> None:
        self.scheduler = Scheduler(limits, clock)
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
        plan = self._plan = self.scheduler.plan()
        if plan is None:
            return False
        prefill_symbols = self._worker.begin(plan, self._answer_lengths(plan))
        self.prefill_symbols += prefill_symbols
        self._step_s = self._service.step_seconds(prefill_symbols, self._worker.num_decoding)
        self.ends_at = self._clock.now + self._step_s
        return True

    def end_step(self) -> TokenBatch:
        """The tokens of the step in flight."""
        assert self._plan is not None
        step_s = self._step_s if self._stream is not None else 0.0
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
