"""Measures speculation: ``python -m bench.speculation [--padded FOLDER] [--rounds 3] [--quick]``.

One server answers every workload with and without drafts by turns (``"speculation": false`` in the request), so that the machine's moods
fall on both. Each answer is compared with the one without drafts: they are the same. A model whose weights are made up
copies nothing, so the workloads with text are asked of the built-in model, or of one of ``bench.padded_demo`` that computes as much
as 0.4 billion parameters. The last table needs no model: the time to draft, in microseconds a slot and step.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.local_server import local_server
from bench.markdown import markdown, median_and_range
from bench.padded_demo import make_padded_demo
from examples.train_demo_model import world
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import Admit, DraftSources
from radixrt.worker.drafts.speculator import Speculator

TIMEOUT_S = 600


@dataclass(frozen=True)
class Work:
    """Requests of one kind."""

    name: str
    at_once: int
    """Requests in flight."""
    bodies: list[dict[str, Any]]
    """To ``/v1/chat/completions``."""
    asked_before: tuple[dict[str, Any], ...] = ()
    """Asked before it is measured, under the same salt, so that their prompts are cached."""


@dataclass(frozen=True)
class Seen:
    """One round of a workload."""

    seconds: float
    tokens: int
    accepted: int
    texts: list[str]
    steps: "Steps"

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one sequence."""
        return self.tokens / max(1, self.tokens - self.accepted)


@dataclass(frozen=True)
class Steps:
    """Counters of the scheduler, or their difference."""

    count: int
    seconds: float
    output: int
    drafted: dict[str, int]
    """By drafter."""
    accepted: dict[str, int]

    @staticmethod
    def until_now(url: str) -> "Steps":
        stats = httpx.get(f"{url}/get_server_info").raise_for_status().json()["stats"]
        return Steps(
            stats["steps"],
            stats["step_seconds"]["total"],
            stats["output_tokens"],
            stats["drafted_tokens"],
            stats["accepted_draft_tokens"],
        )

    def __sub__(self, before: "Steps") -> "Steps":
        return Steps(
            self.count - before.count,
            self.seconds - before.seconds,
            self.output - before.output,
            {name: n - before.drafted[name] for name, n in self.drafted.items()},
            {name: n - before.accepted[name] for name, n in self.accepted.items()},
        )

    def __str__(self) -> str:
        """Time of a step, its tokens and draft rows."""
        drafted = sum(self.drafted.values()) / max(1, self.count)
        tokens = self.output / max(1, self.count)
        return f"{1e3 * self.seconds / max(1, self.count):.1f} ms, {tokens:.1f} tokens, {drafted:.1f} drafts"

    def by_drafter(self) -> str:
        return ", ".join(
            f"{name} {self.accepted[name]} of {drafted}"
            for name, drafted in self.drafted.items()
            if drafted
        )


# ------------------------------------------------------------ workloads


def workloads(quick: bool) -> list[Work]:
    count, length = (4, 24) if quick else (16, 160)
    rng = random.Random(1)
    words = world.Words(rng, "eval")
    story = {
        **_chat([{"role": "user", "content": " ".join(words.noun() for _ in range(40))}]),
        "max_tokens": length,
        "ignore_eos": True,
    }
    unrelated = [
        {
            **_chat(
                [{"role": "user", "content": " ".join(words.noun() for _ in range(30))}],
                temperature=1.0,
                seed=number,
            ),
            "max_tokens": length,
            "ignore_eos": True,
        }
        for number in range(count)
    ]
    random_texts = [body | {"temperature": 2.0} for body in unrelated]
    questions = _each(count, lambda rng, words: world.qa(rng, words, 10, 3, turns=1))
    records = _each(count, lambda rng, words: world.extract_json(rng, words, 4, 4, turns=1))
    known = [_on_one_document(number, count // 4) for number in range(4)]
    openings, *rest = zip(*(one.questions for one in known), strict=True)
    known_questions = [body for each in rest for body in each]
    known_records = [body for one in known for body in one.records]
    as_json = [body | {"response_format": {"type": "json_object"}} for body in known_records]
    return [
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


@dataclass(frozen=True)
class _Known:
    """What is asked about one document."""

    questions: list[dict[str, Any]]
    records: list[dict[str, Any]]


def _on_one_document(number: int, count: int) -> _Known:
    """Each ``count`` times, and one more question."""
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
    return _Known(questions, records)


# ------------------------------------------------------------ measuring


def measure(url: str, work: Work, salt: str, *, speculation: bool) -> Seen:
    """One round. The salt is new, so that neither tree nor pool holds an earlier one."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        fields = body | {"cache_salt": salt, "speculation": speculation}
        response = client.post("/v1/chat/completions", json=fields)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    with (
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(work.at_once) as pool,
    ):
        for body in work.asked_before:
            ask(body)
        before = Steps.until_now(url)
        begin = time.perf_counter()
        answers = list(pool.map(ask, work.bodies))
        seconds = time.perf_counter() - begin
    usages = [answer["usage"] for answer in answers]
    details = [usage["completion_tokens_details"] for usage in usages]
    return Seen(
        seconds,
        sum(usage["completion_tokens"] for usage in usages),
        sum(one["accepted_prediction_tokens"] for one in details),
        [answer["choices"][0]["message"]["content"] for answer in answers],
        Steps.until_now(url) - before,
    )


def compare(url: str, work: Work, rounds: int) -> dict[str, Any]:
    """Rounds with and without drafts by turns."""
    on: list[Seen] = []
    off: list[Seen] = []
    for number in range(rounds + 1):  # the first warms up and does not count
        salts = f"{work.name}{work.at_once}-{number}"
        turns = [(on, True), (off, False)]
        for seen, speculation in turns if number % 2 else turns[::-1]:
            seen.append(measure(url, work, f"{salts}-{speculation}", speculation=speculation))
    same = sum(
        mine == theirs
        for one, other in zip(on, off, strict=True)
        for mine, theirs in zip(one.texts, other.texts, strict=True)
    )
    on, off = on[1:], off[1:]
    return {
        "workload": work.name,
        "at once": work.at_once,
        "tokens/s off": median_and_range([one.tokens_per_s for one in off]),
        "tokens/s on": median_and_range([one.tokens_per_s for one in on]),
        "on ÷ off": statistics.median(one.tokens_per_s for one in on)
        / statistics.median(one.tokens_per_s for one in off),
        "tokens a step": statistics.median(one.tokens_per_step for one in on),
        "accepted": on[-1].steps.by_drafter(),
        "a step off": str(off[-1].steps),
        "a step on": str(on[-1].steps),
        "same answers": f"{same} of {(rounds + 1) * len(work.bodies)}",
    }


def drafting(num_tokens: int, steps: int = 2000) -> dict[str, Any]:
    """Time to draft for a slot whose text, continuation and pool hold ``num_tokens`` each; half of the text repeats itself."""
    rng = random.Random(0)
    text = [rng.randrange(30000) for _ in range(num_tokens // 2)]
    text += rng.choices(text, k=num_tokens - len(text))
    speculator = Speculator((), lambda slot: [], lambda slot, draft: draft)
    for slot in (0, 1):
        sources = DraftSources(pack_ids(text), salt="")
        sampling = SamplingParams(temperature=0.0, max_tokens=1 << 20)
        speculator.admit(Admit(slot, pack_ids(text), 0, b"", sampling, 0, drafts=sources))
        if slot == 0:
            answer = np.array(text[: num_tokens // 2], np.int32)
            speculator.extend(np.zeros(len(answer), np.int64), answer)
            speculator.release(0)
    begin = time.perf_counter()
    speculator.propose(1, 31, 0.05)
    first = time.perf_counter() - begin
    times = []
    for _ in range(steps):
        token = rng.choice(text)
        begin = time.perf_counter()
        draft = speculator.propose(1, 31, 0.05)
        if draft:
            speculator.verified(1, len(draft), int(draft[0] == token))
        speculator.extend(np.array([1]), np.array([token], np.int32))
        times.append(time.perf_counter() - begin)
    return {
        "tokens of each text": num_tokens,
        "median, µs": statistics.median(times) * 1e6,
        "99 %, µs": sorted(times)[int(len(times) * 0.99)] * 1e6,
        "first draft, ms": first * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model-path", default="demo", help="of a checkpoint with the built-in model's tokenizer"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="workloads whose names contain this")
    parser.add_argument("--quick", action="store_true", help="few and short requests")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument(
        "--padded",
        default="",
        metavar="FOLDER",
        help="of the padded model, which is made if it is not there",
    )
    arguments = parser.parse_args()
    if arguments.padded:
        arguments.model_path = str(make_padded_demo(Path(arguments.padded)))
    rows = []
    flags = ("--log-level", "warning", "--max-queue-seconds", "0")
    with local_server(arguments.model_path, *flags) as url:
        for work in workloads(arguments.quick):
            if arguments.only in work.name:
                rows.append(compare(url, work, arguments.rounds))
                print("\n".join(markdown(rows[-1:])[2 * (len(rows) > 1) :]), flush=True)
    drafted = [
        drafting(num_tokens) for num_tokens in ([1024] if arguments.quick else [1024, 8192, 65536])
    ]
    print("\n" + "\n".join(markdown(drafted)))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"workloads": rows, "drafting": drafted}, file, indent=1)


if __name__ == "__main__":
    main()
