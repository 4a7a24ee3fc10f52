"""Compares rules that choose the sequence to retract when pages run out: ``python -m bench.retraction``.

Plays made-up overloads through the real scheduler with the simulated worker of ``radixrt bench cache``, once a rule, and counts
what retractions cost: prompt and answer tokens computed a second time, and the time until everybody has an answer.
Admission forecasts answers as ever, or (*reckless*) expects nothing of them, so that much has to be retracted.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.markdown import markdown
from radixrt.base.config import SchedulerSettings
from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.cache.service import END_OF_ANSWER, ServiceModel, SimulatedWorker, VirtualClock
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.steps import StepPlan
from radixrt.scheduler import planner as planner_module
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.admission import FORECASTS
from radixrt.scheduler.queue.queue_order import QueueOrder
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence

PAGE_SIZE = 16
MAX_TOKENS = 2048
SERVICE = ServiceModel(prefill_tokens_per_s=20_000, decode_step_s=0.02, tokens_per_symbol=1)

Cost = Callable[[Scheduler, Sequence], int]
"""Of two sequences, the one with the smaller is retracted; of equal ones the younger."""


def _pages_alone(scheduler: Scheduler, sequence: Sequence) -> int:
    """Pages that no other running sequence holds: those that its retraction frees, and may lose."""
    pages = len(scheduler.slots.own_pages(sequence.slot))
    node = sequence.node
    while node is not None and node.lock_count == 1:
        pages += node.num_pages
        node = node.parent
    return pages


RULES: dict[str, Cost] = {
    "shortest answer": lambda _, sequence: sequence.num_output,
    "youngest": lambda _, sequence: -sequence.seq_id,
    "fewest pages": lambda scheduler, sequence: int(scheduler.slots.num_pages[sequence.slot]),
    "least to lose": _pages_alone,
    "most to free": lambda scheduler, sequence: -_pages_alone(scheduler, sequence),
}


@dataclass(frozen=True)
class Load:
    """Prompts that arrive at a constant rate, each behind one of some shared prefixes."""

    name: str
    requests: int
    per_second: float
    prefixes: int
    prefix_tokens: int
    prompt_tokens: tuple[int, int]
    """Least and most behind the prefix."""
    answer_mean: float
    """Of a geometric distribution, cut at MAX_TOKENS."""
    pool_tokens: int


LOADS = (
    Load("chat", 600, 8.0, 8, 512, (50, 3000), 250, 48_000),
    Load("one document", 600, 8.0, 2, 8000, (20, 200), 300, 40_000),
    Load("long answers", 400, 4.0, 1, 64, (50, 500), 900, 32_000),
    Load("mixed lengths", 500, 6.0, 20, 1500, (10, 6000), 400, 64_000),
)


@dataclass(frozen=True)
class Row:
    load: str
    admission: str
    rule: str
    retractions: int
    again_percent: float
    """Tokens computed again, of those that had to be computed once."""
    duration_s: float
    ttft_p99_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.retraction", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="each load is played so many times")
    parser.add_argument("--order", default="lpm", help="of the queue; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    rows = [
        _mean(
            [_play(load, rule, reckless, seed, arguments.order) for seed in range(arguments.seeds)]
        )
        for load in LOADS
        for reckless in (False, True)
        for rule in RULES
    ]
    print("\n".join(markdown([asdict(row) for row in rows])))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _mean(rows: list[Row]) -> Row:
    first = rows[0]
    return Row(
        first.load,
        first.admission,
        first.rule,
        round(float(np.mean([row.retractions for row in rows]))),
        float(np.mean([row.again_percent for row in rows])),
        float(np.mean([row.duration_s for row in rows])),
        float(np.mean([row.ttft_p99_s for row in rows])),
    )


class _Requests:
    """The requests of a load, the same for every rule."""

    def __init__(self, load: Load, seed: int) -> None:
        random = np.random.default_rng(seed)
        prefixes = random.integers(0, 30_000, (load.prefixes, load.prefix_tokens))
        lengths = random.integers(*load.prompt_tokens, load.requests, endpoint=True)
        self.prompts = [
            np.concatenate(
                (prefixes[random.integers(load.prefixes)], random.integers(0, 30_000, n))
            )
            for n in lengths
        ]
        answers = random.geometric(1 / load.answer_mean, load.requests)
        self.answers = np.minimum(answers, MAX_TOKENS).tolist()
        self.arrivals = (np.arange(load.requests) / load.per_second).tolist()

    def message(self, number: int) -> SequenceRequest:
        return SequenceRequest(
            seq_id=number,
            token_ids=pack_ids(self.prompts[number]),
            options=RequestOptions(sampling=SamplingParams(max_tokens=MAX_TOKENS)),
        )


class _Player:
    """One load under one rule."""

    def __init__(self, load: Load, seed: int, order: str, reckless: bool) -> None:
        self.requests, self.clock, self.worker = (
            _Requests(load, seed),
            VirtualClock(),
            SimulatedWorker(),
        )
        self.scheduler = Scheduler(_limits(load, order), self.clock)
        if reckless:
            nothing = np.zeros((2, FORECASTS))
            self.scheduler.admission._forecast = lambda *_: nothing  # type: ignore[method-assign]
        self.computed = 0
        self.reached = [0] * load.requests
        """Tokens of each sequence whose KV has been computed or found at some time."""
        self.again = 0
        self.ttft: list[float] = []
        self._next = 0

    def play(self) -> None:
        scheduler, requests = self.scheduler, self.requests
        while self._next < len(requests.prompts) or scheduler.num_running or len(scheduler.waiting):
            self._arrive()
            plan = scheduler.plan()
            if plan is not None:
                self._step(plan)

    def _arrive(self) -> None:
        arrivals, scheduler = self.requests.arrivals, self.scheduler
        if not scheduler.num_running and not len(scheduler.waiting):
            self.clock.now = max(self.clock.now, arrivals[self._next])
        while self._next < len(arrivals) and arrivals[self._next] <= self.clock.now:
            refused = scheduler.add(self.requests.message(self._next))
            assert refused is None, refused
            self._next += 1

    def _step(self, plan: StepPlan) -> None:
        sequences = self.scheduler.slots.sequences
        left = {}
        for admit in plan.admit:
            sequence = sequences[admit.slot]
            assert sequence is not None
            left[admit.slot] = self.requests.answers[sequence.seq_id] - sequence.num_output
        for chunk in plan.prefill:
            self._count(sequences[chunk.slot], chunk.start, chunk.num_tokens)
        prefill = self.worker.begin(plan, left)
        for slot in self.worker._decoding:
            self._count(sequences[slot], int(self.scheduler.slots.planned[slot]) - 1, 1)
        self.clock.now += SERVICE.step_seconds(prefill, self.worker.num_decoding)
        batch = self.scheduler.absorb(self.worker.finish(plan))
        self.ttft += [self.clock.now - self.requests.arrivals[number] for number in batch.started]

    def _count(self, sequence: Sequence | None, start: int, num_tokens: int) -> None:
        assert sequence is not None
        end, reached = start + num_tokens, self.reached[sequence.seq_id]
        self.computed += num_tokens
        self.again += max(0, min(end, reached) - start)
        self.reached[sequence.seq_id] = max(reached, end)


def _limits(load: Load, order: str) -> SchedulerLimits:
    return SchedulerLimits(
        settings=SchedulerSettings(
            max_running_requests=256,
            max_queued_requests=load.requests,
            max_queue_seconds=0,
            max_step_ms=0,
            chunked_prefill_size=2048,
            schedule_policy=order,  # type: ignore[arg-type]
        ),
        max_prefill_tokens=8192,
        context_length=load.prefix_tokens + load.prompt_tokens[1] + MAX_TOKENS + 16,
        num_pages=load.pool_tokens // PAGE_SIZE,
        page_size=PAGE_SIZE,
        eos_token_ids=(END_OF_ANSWER,),
    )


def _play(load: Load, rule: str, reckless: bool, seed: int, order: str) -> Row:
    player = _Player(load, seed, order, reckless)

    def choose(running: list[Sequence], order: QueueOrder) -> Sequence:
        oldest = min(running, key=lambda s: (order.rank(s), s.seq_id))
        others = [s for s in running if s is not oldest] or running
        return min(
            others, key=lambda s: (-order.rank(s), RULES[rule](player.scheduler, s), -s.seq_id)
        )

    original = planner_module.choose_victim
    planner_module.choose_victim = choose
    try:
        player.play()
    finally:
        planner_module.choose_victim = original
    return Row(
        load.name,
        "reckless" if reckless else "forecast",
        rule,
        player.scheduler.counters.retractions,
        100 * player.again / (player.computed - player.again),
        player.clock.now,
        float(np.percentile(player.ttft, 99)),
    )


if __name__ == "__main__":
    main()
