"""Measures planning while many requests wait: the second table of :mod:`bench.overhead`.

The real scheduler with a worker that computes nothing. Every step some answers end, prompts are admitted, the
tree grows and is evicted from, and as many requests arrive as were admitted: the queue keeps its length.
Times are of the processor, so that other programs on the machine do not count.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixrt.base.config import SchedulerSettings
from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.bench.cache.service import SimulatedWorker
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.scheduler import Scheduler

DOCUMENTS = 500
DOCUMENT_TOKENS = 2000
QUESTION_TOKENS = 100
OUTPUT_TOKENS = 40
PAGE_SIZE = 16
ENDLESS = 2**31
"""Tokens of an answer as far as the worker knows; ``max_tokens`` ends it."""

CACHED_DOCUMENTS = 50
"""Documents that fit into the KV pool beside the running sequences."""

WARM_UP_STEPS = 200
"""The pool is full by then."""

WAITING = (10, 100, 1_000, 10_000)


@dataclass(frozen=True)
class QueueCost:
    """Microseconds of the scheduler for one step of any kind: decode, prefill, admission, eviction."""

    policy: str
    waiting: int
    plan_p50: float
    plan_p99: float
    plan_max: float
    arrive_p50: float
    """To queue one request."""
    admissions: float
    """Mean number of sequences that a step admits."""


class _Requests:
    """Questions over documents; their popularity follows Zipf's law."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._documents = self._rng.integers(0, 32000, (DOCUMENTS, DOCUMENT_TOKENS))
        self._next_id = 0

    def next(self) -> SequenceRequest:
        document = self._documents[min(self._rng.zipf(1.2) - 1, DOCUMENTS - 1)]
        question = self._rng.integers(0, 32000, QUESTION_TOKENS)
        outputs = int(self._rng.integers(1, 2 * OUTPUT_TOKENS))
        self._next_id += 1
        return SequenceRequest(
            seq_id=self._next_id,
            token_ids=pack_ids(np.concatenate((document, question))),
            options=RequestOptions(
                sampling=SamplingParams(max_tokens=outputs, ignore_eos=True),
                priority=int(self._rng.integers(0, 3)),
            ),
        )


def measure_queueing(policy: SchedulePolicyName, waiting: int, steps: int) -> QueueCost:
    """Plan ``steps`` steps while ``waiting`` requests wait."""
    running = 64
    tokens_running = running * (DOCUMENT_TOKENS + QUESTION_TOKENS + 2 * OUTPUT_TOKENS)
    scheduler = Scheduler(
        SchedulerLimits(
            settings=SchedulerSettings(
                max_running_requests=running,
                max_queued_requests=2 * waiting + running,
                max_queue_seconds=0,
                max_step_ms=0,
                chunked_prefill_size=2048,
                schedule_policy=policy,
            ),
            max_prefill_tokens=8192,
            context_length=4096,
            num_pages=(tokens_running + CACHED_DOCUMENTS * DOCUMENT_TOKENS) // PAGE_SIZE,
            page_size=PAGE_SIZE,
        )
    )
    worker, requests = SimulatedWorker(), _Requests()
    plan_s, arrive_s, admitted = [], [], []
    for step in range(WARM_UP_STEPS + steps):
        while len(scheduler.state.waiting) < waiting:
            request = requests.next()
            begin = time.thread_time()
            scheduler.add(request)
            arrive_s.append(time.thread_time() - begin)
        begin = time.thread_time()
        plan = scheduler.plan()
        ended = time.thread_time()
        assert plan is not None
        if step >= WARM_UP_STEPS:
            plan_s.append(ended - begin)
            admitted.append(len(plan.admit))
        worker.begin(plan, {admit.slot: ENDLESS for admit in plan.admit})
        scheduler.absorb(worker.finish(plan))
    return QueueCost(
        policy=policy,
        waiting=waiting,
        plan_p50=microseconds(plan_s, 50),
        plan_p99=microseconds(plan_s, 99),
        plan_max=microseconds(plan_s, 100),
        arrive_p50=microseconds(arrive_s, 50),
        admissions=float(np.mean(admitted)),
    )


def microseconds(seconds: Sequence[float] | np.ndarray, percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e6
