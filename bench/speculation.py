"""Measures speculation: ``python -m bench.speculation [--padded FOLDER] [--rounds 3] [--quick]``.

One server answers every workload in interleaved rounds with and without drafts (``"speculation":
false`` in the request), so that the machine's moods fall on both. Of each answer the whole request
is timed, and decoding alone, from its first token on; the CPU time of all processes is that of the
pairs' tokens, with its 95 % interval. Each answer is compared with the one without drafts: they are
the same. ``--against text head`` asks a server of each kind of drafts instead, in interleaved
rounds, and compares all drafters together with the better of them; a server ``off`` does not even
keep a head up. A model whose weights are made up copies nothing, so the workloads with text are
asked of the built-in model, or of one of ``bench.padded_demo`` that computes as much as 0.4 billion
parameters.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.local_server import CpuClock, check_computed, local_server
from bench.markdown import markdown, mean_and_interval, median_and_range
from bench.padded_demo import make_padded_demo
from examples.train_demo_model import world

TIMEOUT_S = 600


@dataclass(frozen=True)
class Work:
    """Requests of one kind."""

    name: str
    at_once: int
    """Requests in flight."""
    bodies: list[dict[str, Any]]
    """Bodies for ``/v1/chat/completions``."""
    asked_before: tuple[dict[str, Any], ...] = ()
    """Asked before it is measured, under the same salt, so that their prompts are cached."""


@dataclass(frozen=True)
class Seen:
    """One round of a workload."""

    seconds: float
    cpu_s: float
    """CPU time of all processes of the server."""
    tokens: int
    accepted: int
    decode_rates: list[float]
    """Tokens per second of each answer behind its first token, so without its prompt."""
    texts: list[str]
    before: dict[str, Any]
    """The server's statistics."""
    after: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Of an answer, without its prompt: the harmonic mean, which is all tokens over all time if
        the answers are alike."""
        return statistics.harmonic_mean(self.decode_rates) if self.decode_rates else math.nan

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one sequence in a step."""
        return self.tokens / max(1, self.tokens - self.accepted)

    @property
    def step(self) -> str:
        """Mean time of a step, its tokens and draft rows."""
        seconds = self.after["step_seconds"]["total"] - self.before["step_seconds"]["total"]
        steps = max(1, self.after["steps"] - self.before["steps"])
        tokens = (self.after["output_tokens"] - self.before["output_tokens"]) / steps
        drafted = sum(self._by_drafter("drafted_tokens").values()) / steps
        return f"{1e3 * seconds / steps:.1f} ms, {tokens:.1f} tokens, {drafted:.1f} drafts"

    @property
    def accepted_by_drafter(self) -> str:
        accepted = self._by_drafter("accepted_draft_tokens")
        drafted = self._by_drafter("drafted_tokens").items()
        return ", ".join(f"{name} {accepted[name]} of {count}" for name, count in drafted if count)

    def _by_drafter(self, name: str) -> dict[str, int]:
        return {drafter: count - self.before[name][drafter] for drafter, count in self.after[name].items()}  # fmt: skip


# ------------------------------------------------------------ workloads


def workloads(quick: bool) -> list[Work]:
    count, length = (4, 24) if quick else (16, 160)
    rng = random.Random(1)
    words = world.Words(rng, "eval")

    def of_nouns(number: int, **fields: Any) -> dict[str, Any]:
        nouns = [{"role": "user", "content": " ".join(words.noun() for _ in range(number))}]
        return _chat(nouns, max_tokens=length, ignore_eos=True, **fields)

    story = of_nouns(40)
    unrelated = [of_nouns(30, temperature=1.0, seed=number) for number in range(count)]
    random_texts = [body | {"temperature": 2.0} for body in unrelated]
    questions = _each(count, lambda rng, words: world.qa(rng, words, 10, 3, turns=1))
    records = _each(count, lambda rng, words: world.extract_json(rng, words, 4, 4, turns=1))
    known = [_on_one_document(number, count // 4) for number in range(4)]
    openings, *rest = zip(*(questions for questions, _ in known), strict=True)
    known_questions = [body for each in rest for body in each]
    known_records = [body for _, records in known for body in records]
    as_json = [body | {"response_format": {"type": "json_object"}} for body in known_records]
    held_out = _held_out(count)
    return [
        Work("held-out prompts", 1, held_out),
        Work("held-out prompts", 16, held_out),
        Work("one greedy request, repeated", 1, [story] * 3, (story,)),
        Work("questions, new documents", 1, questions),
        Work("questions, new documents", 8, questions),
        Work("questions, cached documents", 1, known_questions, openings),
        Work("questions, cached documents", 8, known_questions, openings),
        Work("facts as JSON, new documents", 1, records),
        Work("facts as JSON, new documents", 8, records),
        Work("facts as JSON, cached documents", 1, known_records, openings),
        Work("facts as JSON, cached documents", 8, known_records, openings),
        Work("facts held to JSON, cached documents", 8, as_json, openings),
        Work("unrelated, sampled", 1, unrelated[: max(2, count // 4)]),
        Work("unrelated, sampled", 16, unrelated),
        Work("unrelated, at temperature 2", 1, random_texts[: max(2, count // 4)]),
        Work("unrelated, at temperature 2", 16, random_texts),
    ]


HELD_OUT = Path("examples/train_demo_model/held_out.jsonl")
"""Prompts that no model or head was trained on."""


def _held_out(count: int) -> list[dict[str, Any]]:
    """Some of them, of every task."""
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    return [_chat(**row) for row in rows[:: max(1, len(rows) // (4 * count))]]


def _chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0.0, "max_tokens": 160, **fields}


def _each(
    count: int, make: Callable[[random.Random, world.Words], world.Sample]
) -> list[dict[str, Any]]:
    bodies = []
    for number in range(count):
        rng = random.Random(number)
        sample = make(rng, world.Words(rng, "eval"))
        messages = sample.messages
        asked = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        bodies.append(_chat(messages[:asked]))
    return bodies


def _on_one_document(number: int, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions about one document and its facts as JSON: ``count`` each, and one more question."""
    rng = random.Random(f"known {number}")
    facts = world.make_world(rng, world.Words(rng, "eval"), 10, 4)
    document = world.SYSTEMS[0].format(doc=world.document(rng, facts))

    def ask(question: str) -> dict[str, Any]:
        system = {"role": "system", "content": document}
        return _chat([system, {"role": "user", "content": question}])

    questions = [
        ask(rng.choice(world.QUESTIONS).format(e=e, f=f))
        for e, f in rng.sample(list(facts.facts), count + 1)
    ]
    records = [
        ask(rng.choice(world.JSON_ASKS).format(e=e, fs=", ".join(["name", *fields])))
        for e in rng.choices(facts.entities, k=count)
        if (fields := rng.sample(facts.fields, rng.randint(2, 4)))
    ]
    return questions, records


# ------------------------------------------------------------ measuring


def measure(url: str, work: Work, salt: str, *, speculation: bool) -> Seen:
    """One round. With a new salt, neither tree nor pool holds an earlier one."""

    def ask(body: dict[str, Any]) -> Answer:
        fields = body | {"cache_salt": salt, "speculation": speculation}
        return streamed(client, fields)

    with (
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(work.at_once) as pool,
    ):
        for body in work.asked_before:
            ask(body)
        before, clock = _stats(client), CpuClock([url])
        begin, cpu_begin = time.perf_counter(), clock.seconds()
        answers = list(pool.map(ask, work.bodies))
        seconds, cpu_s = time.perf_counter() - begin, clock.seconds() - cpu_begin
        after = _stats(client)
    usages = [answer.usage for answer in answers]
    for usage in usages:
        check_computed(usage)
    details = [usage["completion_tokens_details"] for usage in usages]
    return Seen(
        seconds,
        cpu_s,
        sum(usage["completion_tokens"] for usage in usages),
        sum(one["accepted_prediction_tokens"] for one in details),
        [
            (usage["completion_tokens"] - 1) / answer.decode_s
            for usage, answer in zip(usages, answers, strict=True)
            if answer.decode_s > 0
        ],
        [answer.text for answer in answers],
        before,
        after,
    )


@dataclass(frozen=True)
class Answer:
    """One answer."""

    text: str
    usage: dict[str, Any]
    decode_s: float
    """From its first token to its last."""


def streamed(client: httpx.Client, fields: dict[str, Any]) -> Answer:
    """Ask for an answer as a stream, which shows when its first token comes."""
    fields = fields | {"stream": True, "stream_options": {"include_usage": True}}
    text, times = "", []
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=fields) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    text += piece
                    times.append(time.perf_counter())
                elif choice["finish_reason"]:
                    times.append(time.perf_counter())
    return Answer(text, usage, times[-1] - times[0] if times else 0.0)


def _stats(client: httpx.Client) -> dict[str, Any]:
    stats: dict[str, Any] = client.get("/get_server_info").raise_for_status().json()["stats"]
    return stats


def compare(urls: dict[str, str], work: Work, rounds: int, *, cached: bool) -> dict[str, Any]:
    """Interleaved rounds of one server with and without drafts."""
    (url,) = urls.values()
    seen = _by_turns({"on": (url, True), "off": (url, False)}, work, rounds, cached=cached)
    same = sum(
        mine == theirs
        for one, other in zip(seen["on"], seen["off"], strict=True)
        for mine, theirs in zip(one.texts, other.texts, strict=True)
    )
    on, off = seen["on"][1:], seen["off"][1:]
    return {
        "workload": work.name,
        "at once": work.at_once,
        "tokens/s off": median_and_range([one.tokens_per_s for one in off]),
        "tokens/s on": median_and_range([one.tokens_per_s for one in on]),
        "on ÷ off": statistics.median(one.tokens_per_s for one in on)
        / statistics.median(one.tokens_per_s for one in off),
        "CPU on ÷ off": _cpu_ratio(on, off),
        "decode off": median_and_range([one.decode_tokens_per_s for one in off]),
        "decode on": median_and_range([one.decode_tokens_per_s for one in on]),
        "decode on ÷ off": statistics.median(one.decode_tokens_per_s for one in on)
        / statistics.median(one.decode_tokens_per_s for one in off),
        "tokens a step": statistics.median(one.tokens_per_step for one in on),
        "accepted": on[-1].accepted_by_drafter,
        "a step off": off[-1].step,
        "a step on": on[-1].step,
        "same answers": f"{same} of {(rounds + 1) * len(work.bodies)}",
    }


def compare_kinds(urls: dict[str, str], work: Work, rounds: int, *, cached: bool) -> dict[str, Any]:
    """Interleaved rounds of servers; the first is compared with the better of the others."""
    sides = {kind: (url, True) for kind, url in urls.items()}
    seen = _by_turns(sides, work, rounds, cached=cached)
    seen = {kind: rounds[1:] for kind, rounds in seen.items()}
    first, *others = seen
    rates = {kind: statistics.median(one.tokens_per_s for one in seen[kind]) for kind in seen}
    return {
        "workload": work.name,
        "at once": work.at_once,
        **{
            f"tokens/s {kind}": median_and_range([one.tokens_per_s for one in rounds])
            for kind, rounds in seen.items()
        },
        f"{first} ÷ better": rates[first] / max(rates[kind] for kind in others),
        **{f"CPU {first} ÷ {kind}": _cpu_ratio(seen[first], seen[kind]) for kind in others},
        **{f"a step, {kind}": rounds[-1].step for kind, rounds in seen.items()},
        **{f"accepted, {kind}": rounds[-1].accepted_by_drafter for kind, rounds in seen.items()},
    }


def _cpu_ratio(on: list[Seen], off: list[Seen]) -> str:
    """CPU time per token, in pairs of rounds."""
    return mean_and_interval(
        [
            (one.cpu_s / one.tokens) / (other.cpu_s / other.tokens)
            for one, other in zip(on, off, strict=True)
        ]
    )


def _by_turns(
    sides: dict[str, tuple[str, bool]], work: Work, rounds: int, *, cached: bool
) -> dict[str, list[Seen]]:
    """Rounds of a server, with drafts or without, by the side's name; one more than ``rounds``: the
    first warms up and does not count, and fills the cache if ``cached``."""
    seen: dict[str, list[Seen]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        turn = number % len(sides)
        for name in [*list(sides)[turn:], *list(sides)[:turn]]:
            url, speculation = sides[name]
            salt = f"{work.name}{work.at_once}-{name}" + f"-{number}" * (not cached)
            seen[name].append(measure(url, work, salt, speculation=speculation))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="demo", help="a checkpoint with the built-in model's tokenizer")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="workloads whose names contain this")
    parser.add_argument("--quick", action="store_true", help="few and short requests")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--padded", default="", metavar="FOLDER", help="folder of the padded model, which is made if it is not there")  # fmt: skip
    parser.add_argument("--speculation", default="auto", choices=("auto", "text", "head"), help="what tokens are drafted from")  # fmt: skip
    parser.add_argument("--at-once", type=int, help="only workloads of so many requests in flight")
    parser.add_argument("--against", nargs="+", default=[], choices=("text", "head", "off"), help="servers whose better one --speculation is compared with")  # fmt: skip
    parser.add_argument("--cached", action="store_true", help="prompts are computed in the round that does not count, so others decode only; text drafts would know the answers")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.padded:
        arguments.model_path = str(make_padded_demo(Path(arguments.padded)))
    measured = compare_kinds if arguments.against else compare
    rows = []
    flags = ("--log-level", "warning", "--max-queue-seconds", "0", "--speculation")
    with contextlib.ExitStack() as servers:
        urls = {
            kind: servers.enter_context(local_server(arguments.model_path, *flags, kind))
            for kind in (arguments.speculation, *arguments.against)
        }
        for work in workloads(arguments.quick):
            if arguments.only in work.name and arguments.at_once in (None, work.at_once):
                rows.append(measured(urls, work, arguments.rounds, cached=arguments.cached))
                print("\n".join(markdown(rows[-1:])[2 * (len(rows) > 1) :]), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
