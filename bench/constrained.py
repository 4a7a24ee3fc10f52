"""Measures what constraints cost and what forced tokens save: ``python -m bench.constrained [--only
masks|mass|jumps]``.

*masks* compares constrained answers with free answers of the same length: the cost of token masks.
*mass* compares the processor time of constrained answers with and without their kept mass.
*jumps* answers the same requests with and without jump-forward; the answers are the same.
All sides take turns in one run.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.byte_tokenizer import train_tokenizer
from bench.dummy_checkpoint import add_shape, write_dummy_checkpoint
from bench.markdown import mean_and_interval, print_rows
from radixrt.base.config import ServerConfig
from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.arguments import positive
from radixrt.bench.report import write_json
from radixrt.constrained.constraint import Constraint, JsonSchema
from radixrt.messages.calls import StatsCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.supervisor.launch import prepare

PROMPT_TOKENS = 64

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["engineer", "analyst", "manager"]},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "scores", "active"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": _PERSON, "minItems": 200}
"""A schema whose answers do not end within a measurement, so that all are equally long."""

RECORD = {
    "type": "object",
    "properties": {
        "invoice_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        "customer_reference": {"type": "string", "pattern": "^[0-9]{8}$"},
        "payment_status": {"enum": ["paid", "outstanding", "overdue"]},
        "billing_country_code": {"enum": ["DE", "FR", "IT", "US"]},
        "total_amount_in_cents": {"type": "integer", "minimum": 0, "maximum": 999999},
        "requires_manual_review": {"type": "boolean"},
    },
    "required": [
        "invoice_number", "customer_reference", "payment_status", "billing_country_code",
        "total_amount_in_cents", "requires_manual_review",
    ],
    "additionalProperties": False,
}  # fmt: skip
"""A record as in information extraction: long names, short values."""


@dataclass(frozen=True)
class MaskCost:
    """Constrained against free answers of the same length; medians of the rounds."""

    concurrency: int
    free_tokens_per_s: float
    constrained_tokens_per_s: float
    ratio: float


@dataclass(frozen=True)
class MassCost:
    """Processor time of constrained answers that report their kept mass, over that of answers that
    do not."""

    concurrency: int
    plain_cpu_s: float
    """Of all processes of the engine, a round; median."""
    ratio: str
    """Where neither jumps over forced tokens; mean of the rounds, with its 95 % interval."""
    with_jumps: str
    """Where those that do not report it may jump."""


@dataclass(frozen=True)
class JumpGain:
    """The same JSON answers with and without jump-forward; medians of the rounds."""

    concurrency: int
    stepping_s: float
    jumping_s: float
    speedup: float
    tokens_per_answer: float
    forced_percent: float
    same_answers: bool


class Load:
    """One engine, and batches of requests for it."""

    def __init__(self, engine: BackgroundEngine) -> None:
        self._engine = engine
        self._ids = itertools.count()

    def answer(
        self, count: int, constraint: Constraint | None, sampling: SamplingParams
    ) -> tuple[float, list[bytes]]:
        """Seconds for ``count`` answers begun at the same time, and their tokens."""
        begin = time.perf_counter()
        answers = self._engine.run(self._gather(count, constraint, sampling))
        return time.perf_counter() - begin, answers

    async def _gather(
        self, count: int, constraint: Constraint | None, sampling: SamplingParams
    ) -> list[bytes]:
        return await asyncio.gather(*(self._one(i, constraint, sampling) for i in range(count)))

    async def _one(
        self, index: int, constraint: Constraint | None, sampling: SamplingParams
    ) -> bytes:
        request = self._request(index, constraint, sampling)
        tokens = [chunk.token_ids async for chunk in self._engine.client.generate(request)]
        return b"".join(tokens)

    def _request(
        self,
        index: int,
        constraint: Constraint | None,
        sampling: SamplingParams,
    ) -> GenerateRequest:
        prompt = [(7 * position + index) % 256 for position in range(PROMPT_TOKENS)]
        return GenerateRequest(
            request_id=f"bench-{next(self._ids)}",
            prompt=TokenPrompt(pack_ids(prompt)),
            options=RequestOptions(sampling=sampling),
            constraint=constraint,
        )

    def forced_tokens(self) -> int:
        return self._engine.run(self._engine.client.call(StatsCall())).forced_tokens


@contextmanager
def _loaded(config: ServerConfig) -> Iterator[Load]:
    engine = BackgroundEngine(config)
    try:
        yield Load(engine)
    finally:
        engine.close()


def measure_masks(load: Load, concurrency: int, output_tokens: int, rounds: int) -> MaskCost:
    """Free and constrained answers by turns."""
    # Log-probabilities are asked for to keep forced tokens from being jumped over: here every token
    # counts.
    held = SamplingParams(temperature=0.0, max_tokens=output_tokens, logprobs=0)
    constraint = JsonSchema(schema=json.dumps(ENDLESS))
    free = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, logprobs=0)
    kinds = [(None, free), (constraint, held)]
    for asked, sampling in kinds:
        load.answer(concurrency, asked, sampling)
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds):
        for (asked, sampling), seconds in zip(kinds, times, strict=True):
            seconds.append(load.answer(concurrency, asked, sampling)[0])
    rates = [concurrency * output_tokens / statistics.median(seconds) for seconds in times]
    return MaskCost(concurrency, rates[0], rates[1], rates[1] / rates[0])


def measure_mass(
    stepping: Load, jumping: Load, concurrency: int, output_tokens: int, rounds: int
) -> MassCost:
    """Answers that report their kept mass, that do not, and that may jump, in alternating order."""
    constraint = JsonSchema(schema=json.dumps(ENDLESS))
    plain = SamplingParams(temperature=0.0, max_tokens=output_tokens)
    massed = msgspec.structs.replace(plain, kept_mass=True)
    kinds = [(stepping, plain), (stepping, massed), (jumping, plain)]
    for load, sampling in kinds:
        load.answer(concurrency, constraint, sampling)
    times: list[list[float]] = [[] for _ in kinds]
    for number in range(rounds):
        order = [0, 1, 2] if number % 2 else [2, 1, 0]
        for kind in order:
            load, sampling = kinds[kind]
            begin = cpu_seconds()
            load.answer(concurrency, constraint, sampling)
            times[kind].append(cpu_seconds() - begin)
    without, reported, jumped = times
    ratios = [mine / theirs for mine, theirs in zip(reported, without, strict=True)]
    over_jumps = [mine / theirs for mine, theirs in zip(reported, jumped, strict=True)]
    return MassCost(
        concurrency,
        statistics.median(without),
        mean_and_interval(ratios, 4),
        mean_and_interval(over_jumps, 2),
    )


def cpu_seconds() -> float:
    """Processor time of all processes that this one has started, and of itself."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)))


def measure_jumps(stepping: Load, jumping: Load, concurrency: int, rounds: int) -> JumpGain:
    """The same requests to two engines by turns."""
    constraint = JsonSchema(schema=json.dumps(RECORD))
    sampling = SamplingParams(temperature=0.0, max_tokens=400)
    for load in (stepping, jumping):
        load.answer(concurrency, constraint, sampling)
    forced_before = jumping.forced_tokens()
    slow, fast, same, num_tokens = [], [], True, 0
    for _ in range(rounds):
        seconds, expected = stepping.answer(concurrency, constraint, sampling)
        slow.append(seconds)
        seconds, answers = jumping.answer(concurrency, constraint, sampling)
        fast.append(seconds)
        same = same and answers == expected
        num_tokens += sum(map(len, answers)) // 4
    forced = jumping.forced_tokens() - forced_before
    return JumpGain(
        concurrency=concurrency,
        stepping_s=statistics.median(slow),
        jumping_s=statistics.median(fast),
        speedup=statistics.median(slow) / statistics.median(fast),
        tokens_per_answer=num_tokens / concurrency / rounds,
        forced_percent=100 * forced / num_tokens,
        same_answers=same,
    )


TITLES = {
    "masks": "Constrained against free answers, forced tokens sampled too",
    "mass": "Constrained answers with their kept mass against those without",
    "jumps": "JSON answers with and without jump-forward",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model_path": arguments.model_path}
        if arguments.model_path is None:
            model = write_dummy_checkpoint(
                Path(folder),
                hidden_size=arguments.hidden_size,
                num_layers=arguments.num_layers,
                vocab_size=arguments.vocab_size,
                tokenizer=train_tokenizer(arguments.vocab_size),
            )
            settings = {"model_path": str(model), "load_format": "dummy"}
        settings |= {"max_running_requests": max(arguments.concurrency) + 1, "context_length": 1024}
        config = ServerConfig(**settings, grammar_whitespace="compact", log_level="warning")
        tables: dict[str, list[Any]] = {}
        with _loaded(prepare(config)) as jumping:
            if arguments.only in (None, "masks"):
                tables["masks"] = [
                    measure_masks(jumping, count, arguments.output_tokens, arguments.rounds)
                    for count in arguments.concurrency
                ]
            if arguments.only != "masks":
                tables |= _beside_stepping(config, jumping, arguments)
    for name, rows in tables.items():
        print_rows(arguments.json, TITLES[name], rows)
    report = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    write_json(arguments.json, report)
    return 0


def _beside_stepping(
    config: ServerConfig, jumping: Load, arguments: argparse.Namespace
) -> dict[str, list[Any]]:
    """The tables that need an engine without jump-forward too."""
    tables: dict[str, list[Any]] = {}
    with _loaded(prepare(replace(config, debug_disable_jump_forward=True))) as stepping:
        if arguments.only in (None, "mass"):
            tables["mass"] = [
                measure_mass(stepping, jumping, count, arguments.output_tokens, arguments.rounds)
                for count in arguments.concurrency
            ]
        if arguments.only in (None, "jumps"):
            tables["jumps"] = [
                measure_jumps(stepping, jumping, count, arguments.rounds)
                for count in arguments.concurrency
            ]
    return tables


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.constrained", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model-path", metavar="DIR", help="a checkpoint to measure with (default: an untrained one, made for it)")  # fmt: skip
    parser.add_argument("--only", choices=tuple(TITLES), help="one table")
    add_shape(parser, hidden_size=896, num_layers=24, vocab_size=32000)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 16], metavar="N", help="answers at a time (default: 1 16)")  # fmt: skip
    parser.add_argument("--output-tokens", type=positive, default=96, metavar="N", help="tokens of each answer where free and constrained ones are compared (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="how often each side is measured, by turns (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the tables; - for stdout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
