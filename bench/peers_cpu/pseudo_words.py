"""Workloads for random weights: seeded pseudo-words with fixed output lengths."""

from typing import Any

import numpy as np

from bench.peers_cpu.tasks import Task, Workload
from radixrt.bench.workloads import Conversation, TextPrompts, Turn

ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 1,
            "maxItems": 4,
        },
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "married"],
    "additionalProperties": False,
}


def workloads() -> list[Workload]:
    return [_rag(), _unrelated(), _chats(), _one_stream(), _json(), _short(), _prefill()]


def _rag() -> Workload:
    text = TextPrompts(np.random.default_rng(1))
    documents = [text(1024) for _ in range(4)]
    # Each engine has to find for itself that the fifth prompt begins like the first.
    asked = [Conversation(each, [Turn(text(32), 32)]) for _ in range(8) for each in documents]
    return Workload("a", "4 documents of 1024 x 8 questions of 32, 32 out", asked, 16)


def _unrelated() -> Workload:
    text = TextPrompts(np.random.default_rng(2))
    return Workload(
        "b",
        "32 unrelated prompts of 256, 64 out",
        [Conversation("", [Turn(text(256), 64)]) for _ in range(32)],
        16,
    )


def _chats() -> Workload:
    text = TextPrompts(np.random.default_rng(3))
    chats = [Conversation("", [Turn(text(48), 32) for _ in range(5)]) for _ in range(8)]
    return Workload("c", "8 chats of 5 turns, 48 in and 32 out each", chats, 8, "chat")


def _one_stream() -> Workload:
    text = TextPrompts(np.random.default_rng(4))
    return Workload(
        "d", "one stream, 128 in, 128 out", [Conversation("", [Turn(text(128), 128)])], 1
    )


def _json() -> Workload:
    text = TextPrompts(np.random.default_rng(5))
    asked = [Task("", [Turn(text(64), 128)], schema=ANSWER_SCHEMA) for _ in range(16)]
    return Workload("e", "16 JSON-schema answers", asked, 8, "chat")


def _short() -> Workload:
    text = TextPrompts(np.random.default_rng(6))
    return Workload(
        "f",
        "64 short requests on the built-in model",
        [Conversation("", [Turn(text(16), 16)]) for _ in range(64)],
        16,
        built_in_model=True,
    )


def _prefill() -> Workload:
    text = TextPrompts(np.random.default_rng(7))
    asked = [Conversation("", [Turn(text(1024), 1)]) for _ in range(8)]
    return Workload("g", "8 prompts of 1024, one at a time, 1 out", asked, 1)
