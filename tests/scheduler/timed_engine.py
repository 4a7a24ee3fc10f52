"""Scheduler and a simulated worker on a virtual clock: the time of a step is a function of its
content."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.cache.engine import END_OF_ANSWER, SimulatedWorker, VirtualClock
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRefused, SequenceRequest
from radixrt.messages.steps import StepPlan
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.step_times import StepShape
from tests.batches import finished
from tests.scheduler.engine_model import limits


@dataclass
class Request:
    """A request and its times, in seconds on the virtual clock."""

    arrival_s: float
    output_tokens: int
    message: SequenceRequest
    refused: SequenceRefused | None = None
    refused_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def latency_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.arrival_s


class TimedEngine:
    """A scheduler that keeps two steps in flight, and requests that arrive at given times.

    Args:
        step_seconds: the time of a step; the context of decoding rows is not told.
        settings: as for :func:`tests.scheduler.engine_model.limits`.
    """

    def __init__(self, step_seconds: Callable[[StepShape], float], **settings: object) -> None:
        settings = {"page_size": 16, "num_pages": 4000, "context_length": 8192, **settings}
        self.clock, self._worker = VirtualClock(), SimulatedWorker()
        self.scheduler = Scheduler(limits(**settings, eos_token_ids=(END_OF_ANSWER,)), self.clock)
        self.requests: list[Request] = []
        self.steps: list[tuple[StepShape, float]] = []
        """Content and time of each step."""
        self._groups: dict[str, list[Request]] = {}
        """The requests that came in one of HTTP, by the name of their group."""
        self._step_seconds = step_seconds
        self._coming: list[tuple[float, int]] = []
        self._sent: deque[StepPlan] = deque()
        self._ready_s = 0.0
        """When the oldest step in flight is done."""
        self._rng = np.random.default_rng(0)

    def add(
        self,
        arrival_s: float,
        prompt: int | np.ndarray,
        output_tokens: int,
        max_tokens: int | None = None,
        group: str = "",
        group_size: int = 1,
        **options: object,
    ) -> Request:
        """A request that arrives later; ``prompt`` are its ids, or the length of a random one."""
        if isinstance(prompt, int):
            prompt = self._rng.integers(1, 1 << 20, prompt)
        message = SequenceRequest(
            seq_id=len(self.requests),
            token_ids=pack_ids(prompt),
            group=group,
            group_size=group_size,
            options=RequestOptions(
                sampling=SamplingParams(max_tokens=max_tokens or output_tokens),
                **options,  # type: ignore[arg-type]
            ),
        )
        request = Request(arrival_s, output_tokens, message)
        heapq.heappush(self._coming, (arrival_s, len(self.requests)))
        self.requests.append(request)
        if group:
            self._groups.setdefault(group, []).append(request)
        return request

    def run(self, until: Callable[[], bool] = lambda: False, check: bool = False) -> None:
        """Until all requests are finished or refused, or ``until`` is true."""
        while not until():
            self._arrive()
            self._refuse(self.scheduler.refuse_overdue())
            self._fill_pipeline()
            if check:
                check_invariants(self.scheduler)
            if self._sent:
                self._finish_step()
            elif self._coming:
                self.clock.now = max(self.clock.now, self._coming[0][0])
            else:
                return

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock.now:
            _, number = heapq.heappop(self._coming)
            if self.requests[number].refused is None:
                refused = self.scheduler.add(self.requests[number].message)
                self._refuse([] if refused is None else [refused])

    def _refuse(self, refused: list[SequenceRefused]) -> None:
        """As the api does, with all others of the same HTTP request."""
        for sequence in refused:
            one = self.requests[sequence.seq_id]
            for request in self._groups.get(one.message.group, [one]):
                request.refused, request.refused_s = sequence, self.clock.now
                self.scheduler.release(np.array([request.message.seq_id], dtype=np.int32))

    def _fill_pipeline(self) -> None:
        while len(self._sent) < 2 and (plan := self.scheduler.plan()) is not None:
            if not self._sent:
                self._ready_s = self.clock.now  # the worker is idle
                self._begin(plan)
            self._sent.append(plan)

    def _begin(self, plan: StepPlan) -> None:
        """The worker takes up a step."""
        lengths = {}
        for admit in plan.admit:
            sequence = self.scheduler.state.slots.sequences[admit.slot]
            assert sequence is not None
            lengths[admit.slot] = self.requests[sequence.seq_id].output_tokens - admit.num_output
        self._worker.begin(plan, lengths)
        shape = StepShape(rows=self._worker.num_decoding, context=0)
        for chunk in plan.prefill:
            shape = shape.with_chunk(chunk.start, chunk.num_tokens)
        seconds = self._step_seconds(shape)
        self.steps.append((shape, seconds))
        self._ready_s += seconds

    def _finish_step(self) -> None:
        """Arrivals up to the end of the step in flight, then its result."""
        while self._coming and self._coming[0][0] <= self._ready_s:
            self.clock.now = max(self.clock.now, self._coming[0][0])
            self._arrive()
            self._fill_pipeline()
        self.clock.now = max(self.clock.now, self._ready_s)
        plan = self._sent.popleft()
        result = msgspec.structs.replace(self._worker.finish(plan), step_s=self.steps[-1][1])
        if self._sent:
            self._begin(self._sent[0])
        batch = self.scheduler.absorb(result)
        for seq_id, output in batch.outputs.items():
            self.requests[seq_id].token_s += [self.clock.now] * len(output.token_ids)
        for seq_id in finished(batch):
            self.requests[seq_id].finished_s = self.clock.now


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))
