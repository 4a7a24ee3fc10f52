"""Workloads for the built-in model's weights: questions about invented documents, whose right
answers are known.

The texts are those of the model's evaluation (``examples/train_demo_model/world.py``): names,
values and fields that it was not trained on.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from bench.peers_cpu.tasks import Task, Workload
from examples.train_demo_model import world
from radixrt.bench.workloads import Turn

MAX_TOKENS = 96
"""Longer than any right answer."""


def workloads() -> list[Workload]:
    return [
        Workload(
            "a",
            "4 documents of 1400 x 8 questions, lookups",
            _on_shared_documents(4, 8),
            16,
            "chat",
        ),
        Workload(
            "b",
            "32 unrelated documents of 300, a question each",
            _tasks(32, "b", lambda rng, words: world.qa(rng, words, 6, 3, turns=1)),
            16,
            "chat",
        ),
        Workload(
            "c",
            "8 chats of 5 questions that refer to the one before",
            _tasks(8, "c", lambda rng, words: world.second_turn(rng, words, 4, 3, turns=5)),
            8,
            "chat",
        ),
        Workload("d", "8 facts as JSON, one stream", _facts(8, "d"), 1, "chat"),
        Workload("e", "16 facts as JSON of a schema", _facts(16, "e", with_schema=True), 8, "chat"),
    ]


def _on_shared_documents(documents: int, questions: int) -> list[Task]:
    """Question by question, so that the next one about the same document comes after those about
    the others."""
    asked = []
    for number in range(documents):
        rng = random.Random(f"a{number}")
        facts = world.make_world(rng, world.Words(rng, "eval"), 18, 4)
        context = world.SYSTEMS[0].format(doc=world.document(rng, facts))
        asked.append(
            [
                _task(
                    [
                        {"role": "system", "content": context},
                        {"role": "user", "content": rng.choice(world.QUESTIONS).format(e=e, f=f)},
                        {"role": "assistant", "content": world.answer_of(facts, e, f)},
                    ]
                )
                for e, f in rng.sample(list(facts.facts), questions)
            ]
        )
    return [task for one_each in zip(*asked, strict=True) for task in one_each]


def _facts(count: int, seed: str, *, with_schema: bool = False) -> list[Task]:
    def one_record(rng: random.Random, words: world.Words) -> world.Sample:
        return world.extract_json(rng, words, 1, 4, turns=1)

    return _tasks(count, seed, one_record, with_schema=with_schema)


def _tasks(
    count: int,
    seed: str,
    make: Callable[[random.Random, world.Words], world.Sample],
    *,
    with_schema: bool = False,
) -> list[Task]:
    rngs = [random.Random(f"{seed}{number}") for number in range(count)]
    samples = [make(rng, world.Words(rng, "eval")) for rng in rngs]
    return [_task(sample.messages, with_schema=with_schema) for sample in samples]


def _task(messages: list[dict[str, Any]], *, with_schema: bool = False) -> Task:
    """A conversation with the user's messages; the assistant's are the right answers."""
    said = {
        role: [message["content"] for message in messages if message["role"] == role]
        for role in ("system", "user", "assistant")
    }
    turns = [Turn(question, MAX_TOKENS) for question in said["user"]]
    right = tuple(said["assistant"])
    schema = _schema_of(json.loads(right[0])) if with_schema else None
    return Task("".join(said["system"]), turns, schema=schema, right=right)


def _schema_of(answer: dict[str, Any]) -> dict[str, Any]:
    """An object with the answer's fields and nothing else."""
    kinds = {name: "integer" if isinstance(v, int) else "string" for name, v in answer.items()}
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": list(answer),
        "additionalProperties": False,
    }
