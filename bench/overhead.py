"""Measures what the engine costs beside the model: ``python -m bench.overhead``.

Three tables. The first drives the real scheduler with made-up results: time to plan a pure decode step, to
encode the plan, and to absorb its result. The second plans steps of every kind while many requests wait
(:mod:`bench.queueing`). The third runs the whole engine on a dummy model and compares the wall time
of its decode steps with the model's forward passes inside them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.progress import track

from bench.dummy_checkpoint import add_shape, write_dummy_checkpoint
from bench.queueing import WAITING, measure_queueing, microseconds
from radixrt.base.config import SchedulerSettings
from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.arguments import positive
from radixrt.bench.output import console_beside, print_rows, write_json
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.steps import StepResult
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.queue_order import ORDERS
from radixrt.scheduler.scheduler import Scheduler

BATCH_SIZES = (1, 16, 64, 256)
PROMPT_TOKENS = 64
PAGE_SIZE = 16


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
    limits = SchedulerLimits(
        settings=SchedulerSettings(
            max_running_requests=running,
            max_queued_requests=running,
            max_queue_seconds=0,
            max_step_ms=0,
            chunked_prefill_size=PROMPT_TOKENS,
        ),
        max_prefill_tokens=running * PROMPT_TOKENS,
        context_length=PROMPT_TOKENS + steps + 8,
        num_pages=pages,
        page_size=PAGE_SIZE,
    )
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=steps + 4, ignore_eos=True)
    for seq_id in range(running):
        prompt = rng.integers(0, 32000, PROMPT_TOKENS + seq_id % PAGE_SIZE - PAGE_SIZE)
        scheduler.add(
            SequenceRequest(
                seq_id=seq_id,
                token_ids=pack_ids(prompt),
                options=RequestOptions(sampling=sampling),
            )
        )
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
        tokens = pack_ids(rng.integers(0, 32000, running))
        result = StepResult(step_id=step, slots=slots, token_ids=tokens)
        before_absorb = time.perf_counter()
        scheduler.absorb(result)
        absorbed = time.perf_counter()
        rows.append((planned - begin, encoded - planned, absorbed - before_absorb, len(frame)))
    plan_s, encode_s, absorb_s, sizes = np.array(rows).T
    return PlanCost(
        running=running,
        plan_p50=microseconds(plan_s, 50),
        plan_p99=microseconds(plan_s, 99),
        encode_p50=microseconds(encode_s, 50),
        absorb_p50=microseconds(absorb_s, 50),
        absorb_p99=microseconds(absorb_s, 99),
        plan_bytes_p50=float(np.percentile(sizes, 50)),
    )


def measure_engine(
    model_dir: Path, batch_sizes: list[int], output_tokens: int
) -> list[StepAnatomy]:
    """Decode with all processes running; prompts are cached before, so that almost all steps are decode steps."""
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
    console = console_beside(arguments.json)
    planning = [
        measure_planning(running, arguments.plan_steps)
        for running in track(BATCH_SIZES, "Planning", console=console, transient=True)
    ]
    print_rows(console, "The scheduler, per pure decode step (µs)", planning)
    queueing = [
        measure_queueing(policy, waiting, arguments.plan_steps)
        for policy in track(ORDERS, "Queueing", console=console, transient=True)
        for waiting in WAITING
    ]
    print_rows(console, "The scheduler, per step while requests wait (µs)", queueing)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_dummy_checkpoint(
            Path(folder),
            hidden_size=arguments.hidden_size,
            num_layers=arguments.num_layers,
            dtype="float32",
        )
        engine = measure_engine(model_dir, arguments.batch_sizes, arguments.output_tokens)
    print_rows(console, "The whole engine, per mean step (ms)", engine)
    report = {
        "planning_us": [asdict(row) for row in planning],
        "queueing_us": [asdict(row) for row in queueing],
        "engine_ms": [asdict(row) for row in engine],
    }
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
