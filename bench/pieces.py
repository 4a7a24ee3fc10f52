"""Measures what is computed ahead: ``python -m bench.pieces [--only arriving|idle] [--padded
FOLDER] [--rounds 5]``.

*arriving*: a prompt of 4,096 tokens arrives in pieces over five seconds. Its time to first token
after the commit is compared with that of a request of which all but the last piece is cached, plus
one step: the one that may be in flight when the commit comes. Both, and the whole prompt at once,
take turns.

*idle*: requests arrive at random times, with and without prompts that are computed in idle time
beside them, by turns and at the same times. A request may wait for one idle step.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from bench.local_server import check_computed, local_server
from bench.markdown import median_and_range, print_rows
from bench.padded_demo import make_padded_demo
from radixrt.base.config import DEMO_MODEL
from radixrt.bench.arguments import positive
from radixrt.bench.client import RequestRecord, Target, converse
from radixrt.bench.report import write_json
from radixrt.bench.workloads import SYLLABLES, Conversation, Turn
from radixrt.models.checkpoint import resolve_model_path

TIMEOUT_S = 120
MOST_RATIO = 1.05
"""Of a 99th percentile with idle work to that without."""

USE = 0.4
"""Share of the time for which the server is busy with requests, about, beside idle work."""
REQUEST_TOKENS, ANSWER_TOKENS, IDLE_TOKENS = 256, 32, 2000


@dataclass(frozen=True)
class Arriving:
    """Milliseconds until the first token; medians and ranges of the rounds."""

    pieces: str
    """After the commit of a prompt that has arrived in pieces."""
    last_piece: str
    """Of the whole prompt, where all but the last piece is cached."""
    step: str
    """Mean idle step."""
    at_once: str
    """Of the whole prompt, where nothing is cached."""
    computed_tokens: str
    """Prompt tokens that were left when the commit came."""
    verdict: str


@dataclass(frozen=True)
class Percentile:
    """A 99th percentile in milliseconds, over all rounds."""

    latency: str
    without: float
    with_idle_work: float
    ratio: float
    step: float
    """Mean idle step."""
    samples: int
    verdict: str


class Texts:
    """Random texts of a number of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(1)

    def __call__(self, num_tokens: int) -> str:
        text = ""
        while (count := len(self._tokenizer.encode(text, add_special_tokens=False))) < num_tokens:
            for _ in range(max(1, (num_tokens - count) // 4)):
                syllables = self._rng.choices(SYLLABLES, k=self._rng.randint(1, 3))
                text += "".join(syllables) + self._rng.choice((" ", " ", " ", ". "))
        return text


def stats(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/get_server_info").raise_for_status().json()["stats"]
    return found


# ------------------------------------------------------------ prompts that arrive


@dataclass
class Rounds:
    """What the rounds have shown, in seconds and tokens."""

    pieces: list[float] = field(default_factory=list)
    last_piece: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)


def measure_arriving(
    url: str, texts: Texts, *, tokens: int, piece_tokens: int, seconds: float, rounds: int
) -> Arriving:
    """Rounds of the three ways; the first round warms up and does not count."""
    seen = Rounds()
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for number in range(rounds + 1):
            pieces = [texts(piece_tokens) for _ in range(tokens // piece_tokens)]
            one = Rounds() if number == 0 else seen
            _in_pieces(client, pieces, seconds, f"pieces {number}", one)
            _behind_cached(client, pieces, f"cached {number}", one)
            ttft, _ = first_token(client, chat("".join(pieces), f"whole {number}"))
            one.at_once.append(ttft)
    pieces_s, rest_s, step_s = map(statistics.median, (seen.pieces, seen.last_piece, seen.step))
    met = "met" if pieces_s <= rest_s + step_s else "missed"
    return Arriving(
        *(_ms(times) for times in (seen.pieces, seen.last_piece, seen.step, seen.at_once)),
        median_and_range(seen.computed_tokens, 0),
        f"{1e3 * pieces_s:.1f} <= {1e3 * (rest_s + step_s):.1f}: {met}",
    )


def _in_pieces(
    client: httpx.Client, pieces: list[str], seconds: float, salt: str, seen: Rounds
) -> None:
    before, begin = stats(client), time.perf_counter()
    first, *rest = pieces
    opened = client.post("/v1/prompts", json=chat(first, salt)).raise_for_status().json()
    path = f"/v1/prompts/{opened['id']}"
    for number, piece in enumerate(rest, 1):
        time.sleep(max(0.0, begin + number * seconds / len(rest) - time.perf_counter()))
        client.post(path, json={"text": piece, "cache_salt": salt}).raise_for_status()
    ttft, usage = first_token(client, {"max_tokens": 1, "cache_salt": salt}, f"{path}/commit")
    after = stats(client)
    steps = max(1, after["steps"] - before["steps"])
    seen.pieces.append(ttft)
    seen.step.append((after["idle_seconds"] - before["idle_seconds"]) / steps)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    seen.computed_tokens.append(usage["prompt_tokens"] - cached)


def _behind_cached(client: httpx.Client, pieces: list[str], salt: str, seen: Rounds) -> None:
    first_token(client, chat("".join(pieces[:-1]), salt))
    ttft, _ = first_token(client, chat("".join(pieces), salt))
    seen.last_piece.append(ttft)


def chat(content: str, salt: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "cache_salt": salt,
        "max_tokens": 1,
        "temperature": 0,
    }


def first_token(
    client: httpx.Client, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of a streamed answer, and the answer's usage."""
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    first, usage, begin = 0.0, {}, time.perf_counter()
    with client.stream("POST", path, json=body | fields) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if not first and any(choice.get("token_ids") for choice in event["choices"]):
                    first = time.perf_counter() - begin
                usage = event.get("usage") or usage
    check_computed(usage)
    return first, usage


# ------------------------------------------------------------ requests beside idle work


def measure_beside_idle(url: str, texts: Texts, *, seconds: float, rounds: int) -> list[Percentile]:
    """Requests at the same random times with and without idle work, by turns."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        alone_s = _seconds_of_a_request(client, texts)
        step_s = _seconds_of_an_idle_step(client, texts)
        records: dict[bool, list[RequestRecord]] = {False: [], True: []}
        for number in range(rounds):
            times = _arrivals(random.Random(number), seconds, USE / alone_s)
            for idle in (False, True) if number % 2 else (True, False):
                before = stats(client)["idle_tokens"]
                records[idle] += asyncio.run(_requests(url, texts, times, idle=idle))
                computed = stats(client)["idle_tokens"] - before
                if idle != computed > 0:
                    raise RuntimeError(f"{computed} tokens were computed in idle time.")
    latencies = {
        "ITL": [[gap for one in records[idle] for gap in one.inter_token_latencies] for idle in records],
        "TTFT": [[one.ttft for one in records[idle]] for idle in records],
    }  # fmt: skip
    return [
        _percentile(name, *both, step_s if name == "TTFT" else 0.0)
        for name, both in latencies.items()
    ]


def _percentile(
    latency: str, without: Sequence[float], beside: Sequence[float], step_s: float
) -> Percentile:
    off, on, step = 1e3 * np.percentile(without, 99), 1e3 * np.percentile(beside, 99), 1e3 * step_s
    most = MOST_RATIO * off + step
    met = "met" if on <= most else "missed"
    return Percentile(
        f"{latency} p99", off, on, on / off, step, len(beside), f"{on:.2f} <= {most:.2f}: {met}"
    )


def _arrivals(rng: random.Random, seconds: float, rate: float) -> list[float]:
    """Seconds from the beginning, of a Poisson process."""
    times, now = [], rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def _seconds_of_a_request(client: httpx.Client, texts: Texts) -> float:
    def ask() -> float:
        begin = time.perf_counter()
        body = {"prompt": texts(REQUEST_TOKENS), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()
        return time.perf_counter() - begin

    return statistics.median([ask() for _ in range(8)][2:])


def _seconds_of_an_idle_step(client: httpx.Client, texts: Texts) -> float:
    bodies = [_idle_prompt(texts) for _ in range(4)]
    client.post("/v1/cache/warm", json=bodies[0]).raise_for_status()
    before = stats(client)
    for body in bodies[1:]:
        client.post("/v1/cache/warm", json=body).raise_for_status()
    after = stats(client)
    seconds: float = after["idle_seconds"] - before["idle_seconds"]
    return seconds / max(1, after["steps"] - before["steps"])


def _idle_prompt(texts: Texts) -> dict[str, Any]:
    return {"prompt": texts(IDLE_TOKENS), "priority": "idle"}


async def _requests(
    url: str, texts: Texts, times: list[float], *, idle: bool
) -> list[RequestRecord]:
    """The records of requests that are sent at these times."""
    target = Target(f"{url}/v1", "model", return_token_ids=True)
    prompts = [texts(REQUEST_TOKENS) for _ in times]
    ahead = [_idle_prompt(texts) for _ in range(20)]

    async def ask(client: httpx.AsyncClient, number: int) -> RequestRecord:
        await asyncio.sleep(begin + times[number] - time.perf_counter())
        turns = [Turn(prompts[number], ANSWER_TOKENS)]
        (record,) = [
            record async for record in converse(client, target, number, Conversation("", turns))
        ]
        if record.error is not None:
            raise RuntimeError(record.error)
        check_computed({"replayed_tokens": record.replayed_tokens})
        return record

    async def compute_ahead(client: httpx.AsyncClient) -> None:
        for number, body in enumerate(ahead * 1000):
            salted = body | {"cache_salt": f"{begin} {number}"}
            (await client.post("/v1/cache/warm", json=salted)).raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        begin = time.perf_counter()
        feeding = [asyncio.create_task(compute_ahead(client)) for _ in range(2 * idle)]
        try:
            return await asyncio.gather(*(ask(client, number) for number in range(len(times))))
        finally:
            for feeder in feeding:
                feeder.cancel()
            await asyncio.gather(*feeding, return_exceptions=True)


# ------------------------------------------------------------


def _ms(seconds: Sequence[float]) -> str:
    return median_and_range([1e3 * one for one in seconds])


@contextmanager
def _served(model: str) -> Iterator[tuple[str, Texts]]:
    tokenizer = Tokenizer.from_file(str(Path(resolve_model_path(model)) / "tokenizer.json"))
    flags = ("--log-level", "warning", "--max-queue-seconds", "0", "--speculation", "off")
    flags += ("--served-model-name", "model")
    with local_server(model, *flags) as url:
        yield url, Texts(tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    arguments = _parse(argv)
    model = str(make_padded_demo(Path(arguments.padded))) if arguments.padded else DEMO_MODEL
    arriving: list[Arriving] = []
    percentiles: list[Percentile] = []
    rounds, length = arguments.rounds, arguments.seconds
    with _served(model) as (url, texts):
        if arguments.only in (None, "arriving"):
            tokens, piece = arguments.tokens, arguments.piece_tokens
            arriving.append(
                measure_arriving(
                    url, texts, tokens=tokens, piece_tokens=piece, seconds=length, rounds=rounds
                )
            )
            title = f"{tokens:,} tokens that arrive over {length:g} s"
            print_rows(arguments.json, title, arriving)
        if arguments.only in (None, "idle"):
            percentiles += measure_beside_idle(url, texts, seconds=2 * length, rounds=rounds)
            print_rows(arguments.json, "Requests beside idle work", percentiles)
    rows: list[Arriving | Percentile] = [*arriving, *percentiles]
    write_json(arguments.json, [asdict(row) for row in rows])
    return int(any(row.verdict.endswith("missed") for row in rows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pieces", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", choices=("arriving", "idle"), help="one of the two")
    parser.add_argument("--padded", default="", metavar="FOLDER", help="a model of bench.padded_demo, which is made if it is not there, in place of the built-in one")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=5.0, help="in which the prompt arrives; requests beside idle work arrive for twice as long in each turn (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help="of the prompt that arrives (default: %(default)s)")  # fmt: skip
    parser.add_argument("--piece-tokens", type=positive, default=64, metavar="N", help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the tables; - for stdout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
