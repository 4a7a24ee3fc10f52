"""Measures what the engine costs beside the model: ``python -m bench.overhead``.

Three tables. The first drives the real scheduler with made-up results: time to plan a pure decode
step, to encode the plan, and to absorb its result. The second plans steps of every kind with a
worker that computes nothing: every step some answers end, prompts are admitted, the tree grows and
is evicted from, and as many requests arrive as were admitted, so the queue keeps its length. Its
times are of the processor, so that other programs do not count. The third runs the whole engine on
a dummy model and compares the wall time of its decode steps with the model's forward passes inside
them.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.dummy_checkpoint import add_shape, write_dummy_checkpoint
from bench.markdown import print_rows
from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.scheduling import SchedulerSettings
from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.bench.arguments import positive
from radixrt.bench.cache.engine import SimulatedWorker
from radixrt.bench.report import write_json
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.steps import StepResult
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.waiting_queue import ORDERS
from radixrt.scheduler.scheduler import Scheduler

BATCH_SIZES = (1, 16, 64, 256)
PROMPT_TOKENS = 64
PAGE_SIZE = 16
VOCABULARY = 32_000

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 500, 2000, 100, 40
"""The requests that wait are questions about documents."""
CACHED_DOCUMENTS = 50
"""Documents that fit into the KV pool beside the running sequences."""
WARM_UP_STEPS = 200
"""The pool is full by then."""
WAITING = (10, 100, 1_000, 10_000)
ENDLESS = 2**31
"""Tokens of an answer as far as the worker knows; ``max_tokens`` ends it."""


@dataclass(frozen=True)
class PlanCost:
    """Microseconds of the scheduler for one pure decode step."""

    running: int
    plan_p50: float
    plan_p99: float
    encode_p50: float
    absorb_p50: float
    absorb_p99: float
    plan_bytes_p50: float


@dataclass(frozen=True)
class QueueCost:
    """Microseconds of the scheduler for one step of any kind."""

    policy: str
    waiting: int
    plan_p50: float
    plan_p99: float
    plan_max: float
    arrive_p50: float
    """Time to queue one request."""
    admissions: float
    """Mean number of sequences that a step admits."""


@dataclass(frozen=True)
class StepAnatomy:
    """Milliseconds of a mean decode step of the whole engine."""

    running: int
    period_ms: float
    """Wall time from one step to the next."""
    forward_ms: float
    """The part of the model's forward pass."""
    apply_and_sample_ms: float
    """The part of the worker before and after the forward pass."""
    wait_ms: float
    """The part in which the worker waits for a plan."""
    overhead_percent: float
    """The share of the period outside the forward pass."""


def measure_planning(running: int, steps: int) -> PlanCost:
    """Plan, encode and absorb ``steps`` decode steps of ``running`` sequences."""
    pages = running * (-(-(PROMPT_TOKENS + steps + 8) // PAGE_SIZE) + 1)
    scheduler = _scheduler(
        running, PROMPT_TOKENS, running * PROMPT_TOKENS, PROMPT_TOKENS + steps + 8, pages
    )
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=steps + 4, ignore_eos=True)
    for seq_id in range(running):
        prompt = rng.integers(0, VOCABULARY, PROMPT_TOKENS + seq_id % PAGE_SIZE - PAGE_SIZE)
        options = RequestOptions(sampling=sampling)
        tokens = pack_ids(prompt)
        scheduler.add(SequenceRequest(seq_id=seq_id, token_ids=tokens, options=options))
    scheduler.plan()
    slots = pack_ids(range(running))
    encoder = msgspec.msgpack.Encoder()
    rows = []
    for step in range(steps):
        begin = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        frame = encoder.encode(plan)
        encoded = time.perf_counter()
        tokens = pack_ids(rng.integers(0, VOCABULARY, running))
        result = StepResult(step_id=step, slots=slots, token_ids=tokens)
        before_absorb = time.perf_counter()
        scheduler.absorb(result)
        absorbed = time.perf_counter()
        rows.append((planned - begin, encoded - planned, absorbed - before_absorb, len(frame)))
    plan_s, encode_s, absorb_s, sizes = np.array(rows).T
    return PlanCost(
        running=running,
        plan_p50=_microseconds(plan_s, 50),
        plan_p99=_microseconds(plan_s, 99),
        encode_p50=_microseconds(encode_s, 50),
        absorb_p50=_microseconds(absorb_s, 50),
        absorb_p99=_microseconds(absorb_s, 99),
        plan_bytes_p50=float(np.percentile(sizes, 50)),
    )


def _scheduler(
    running: int,
    chunk: int,
    step_tokens: int,
    context_length: int,
    num_pages: int,
    *,
    queued: int = 0,
    policy: SchedulePolicyName = "lpm",
) -> Scheduler:
    """A scheduler without bounds in time."""
    settings = SchedulerSettings(
        max_running_requests=running,
        max_queued_requests=queued + running,
        max_queue_seconds=0,
        max_step_ms=0,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
    )
    return Scheduler(
        SchedulerLimits(
            settings=settings,
            max_prefill_tokens=step_tokens,
            context_length=context_length,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
        )
    )


def questions() -> Iterator[SequenceRequest]:
    """Questions over documents whose popularity follows Zipf's law."""
    rng = np.random.default_rng(0)
    documents = rng.integers(0, VOCABULARY, (DOCUMENTS, DOCUMENT_TOKENS))
    for seq_id in itertools.count(1):
        document = documents[min(rng.zipf(1.2) - 1, DOCUMENTS - 1)]
        question = rng.integers(0, VOCABULARY, QUESTION_TOKENS)
        max_tokens = int(rng.integers(1, 2 * ANSWER_TOKENS))
        options = RequestOptions(
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            priority=int(rng.integers(0, 3)),
        )
        tokens = pack_ids(np.concatenate((document, question)))
        yield SequenceRequest(seq_id=seq_id, token_ids=tokens, options=options)


def measure_queueing(policy: SchedulePolicyName, waiting: int, steps: int) -> QueueCost:
    """Plan ``steps`` steps while ``waiting`` requests wait."""
    running = 64
    tokens_running = running * (DOCUMENT_TOKENS + QUESTION_TOKENS + 2 * ANSWER_TOKENS)
    pages = (tokens_running + CACHED_DOCUMENTS * DOCUMENT_TOKENS) // PAGE_SIZE
    scheduler = _scheduler(running, 2048, 8192, 4096, pages, queued=2 * waiting, policy=policy)
    worker, requests = SimulatedWorker(), questions()
    plan_s, arrive_s, admitted = [], [], []
    for step in range(WARM_UP_STEPS + steps):
        while len(scheduler.state.waiting) < waiting:
            request = next(requests)
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
        plan_p50=_microseconds(plan_s, 50),
        plan_p99=_microseconds(plan_s, 99),
        plan_max=_microseconds(plan_s, 100),
        arrive_p50=_microseconds(arrive_s, 50),
        admissions=float(np.mean(admitted)),
    )


def _microseconds(seconds: Sequence[float] | np.ndarray, percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e6


def measure_engine(
    model_dir: Path, batch_sizes: list[int], output_tokens: int
) -> list[StepAnatomy]:
    """Decode with all processes running; prompts are cached, so almost all steps decode."""
    from radixrt.offline.llm import LLM

    rows = []
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    settings = {
        "load_format": "dummy",
        "max_running_requests": max(batch_sizes),
        "context_length": 1024,
    }
    with LLM(str(model_dir), **settings) as llm:
        for running in batch_sizes:
            prompts = [[5 + i % 1000, 7, 9 + i // 1000] for i in range(running)]
            llm.generate(prompts, sampling, progress=False)
            before = llm.stats()
            llm.generate(prompts, sampling, progress=False)
            after = llm.stats()
            steps = after.steps - before.steps
            worked_s = after.step_seconds.total - before.step_seconds.total
            forward_s = after.forward_seconds - before.forward_seconds
            wait_s = after.wait_seconds - before.wait_seconds
            period_s = worked_s + wait_s
            rows.append(
                StepAnatomy(
                    running=running,
                    period_ms=period_s / steps * 1e3,
                    forward_ms=forward_s / steps * 1e3,
                    apply_and_sample_ms=(worked_s - forward_s) / steps * 1e3,
                    wait_ms=wait_s / steps * 1e3,
                    overhead_percent=100 * (period_s - forward_s) / period_s,
                )
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    arguments = _parse(argv)
    planning = [measure_planning(running, arguments.plan_steps) for running in BATCH_SIZES]
    print_rows(arguments.json, "The scheduler, per pure decode step (µs)", planning)
    queueing = [
        measure_queueing(policy, waiting, arguments.plan_steps)
        for policy in ORDERS
        for waiting in WAITING
    ]
    print_rows(arguments.json, "The scheduler, per step while requests wait (µs)", queueing)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_dummy_checkpoint(
            Path(folder),
            hidden_size=arguments.hidden_size,
            num_layers=arguments.num_layers,
            dtype="float32",
        )
        engine = measure_engine(model_dir, arguments.batch_sizes, arguments.output_tokens)
    print_rows(arguments.json, "The whole engine, per mean step (ms)", engine)
    tables: dict[str, Any] = {"planning_us": planning, "queueing_us": queueing, "engine_ms": engine}
    report = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    write_json(arguments.json, report)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--plan-steps", type=positive, default=1000, metavar="N", help="steps planned for each batch size and each length of the queue (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 16, 64], metavar="N", help="running sequences in the engine's measurement (default: 1 16 64)")  # fmt: skip
    parser.add_argument("--output-tokens", type=positive, default=200, metavar="N", help="tokens of each answer in the engine's measurement (default: %(default)s)")  # fmt: skip
    add_shape(parser, hidden_size=512, num_layers=8)
    parser.add_argument("--json", metavar="FILE", help="write the tables; - for stdout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
