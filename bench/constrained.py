"""Measures what constraints cost and what forced tokens save: ``python -m bench.constrained``.

The first table compares constrained answers with free answers of the same length: the cost of token
masks. The second answers the same requests with and without jump-forward; the answers are the same.
Both sides take turns in one run.
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

import msgspec

from bench.byte_tokenizer import train_tokenizer
from bench.dummy_checkpoint import add_shape, write_dummy_checkpoint
from bench.markdown import print_rows
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
    kept_mass_ratio: float
    """Constrained answers that report the kept mass against those that do not."""


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
    """Free and constrained answers, the latter also with their kept mass, by turns."""
    # Log-probabilities are asked for to keep forced tokens from being jumped over: here every token
    # counts.
    held = SamplingParams(temperature=0.0, max_tokens=output_tokens, logprobs=0)
    constraint = JsonSchema(schema=json.dumps(ENDLESS))
    free = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, logprobs=0)
    massed = msgspec.structs.replace(held, kept_mass=True)
    kinds = [(None, free), (constraint, held), (constraint, massed)]
    for asked, sampling in kinds:
        load.answer(concurrency, asked, sampling)
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds):
        for (asked, sampling), seconds in zip(kinds, times, strict=True):
            seconds.append(load.answer(concurrency, asked, sampling)[0])
    rates = [concurrency * output_tokens / statistics.median(seconds) for seconds in times]
    return MaskCost(concurrency, rates[0], rates[1], rates[1] / rates[0], rates[2] / rates[1])


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
        with _loaded(prepare(config)) as jumping:
            masks = [
                measure_masks(jumping, count, arguments.output_tokens, arguments.rounds)
                for count in arguments.concurrency
            ]
            title = "Constrained against free answers, forced tokens sampled too"
            print_rows(arguments.json, title, masks)
            with _loaded(prepare(replace(config, debug_disable_jump_forward=True))) as stepping:
                jumps = [
                    measure_jumps(stepping, jumping, count, arguments.rounds)
                    for count in arguments.concurrency
                ]
        print_rows(arguments.json, "JSON answers with and without jump-forward", jumps)
    report = {"masks": [asdict(row) for row in masks], "jumps": [asdict(row) for row in jumps]}
    write_json(arguments.json, report)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.constrained", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model-path", metavar="DIR", help="a checkpoint to measure with (default: an untrained one, made for it)")  # fmt: skip
    add_shape(parser, hidden_size=896, num_layers=24, vocab_size=32000)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 16], metavar="N", help="answers at a time (default: 1 16)")  # fmt: skip
    parser.add_argument("--output-tokens", type=positive, default=96, metavar="N", help="tokens of each answer where free and constrained ones are compared (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="how often each side is measured, by turns (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the tables; - for stdout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
