"""One engine of a replay: a real scheduler with a simulated worker, one step in flight at a
time."""

import math
from collections.abc import Callable

from radixrt.bench.cache.service import ServiceModel, SimulatedWorker, VirtualClock
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.messages.steps import StepPlan
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.kv_events import EventRecorder, EventStream
from radixrt.scheduler.scheduler import Scheduler


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
            tree.observer = EventRecorder(limits.num_pages, limits.page_size, with_token_ids=False)
            self._stream = EventStream(tree.observer, max_batches=1)

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
