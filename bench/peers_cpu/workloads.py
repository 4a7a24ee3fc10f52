"""The six workloads for every engine: seeded text with fixed output lengths."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from radixrt.bench.workloads import Conversation, TextPrompts, Turn

QUICK_CONVERSATIONS, QUICK_CHARACTERS, QUICK_OUTPUT = 6, 600, 8

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


@dataclass(frozen=True)
class Workload:
    """Lengths are approximate numbers of tokens; the report has the counts of the servers."""

    name: str
    what: str
    conversations: list[Conversation]
    concurrency: int
    endpoint: str = "completions"
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the request."""
    schema: dict[str, Any] | None = None
    """The schema of every answer; with one, answers may end by themselves."""
    built_in_model: bool = False

    @property
    def ignore_eos(self) -> bool:
        return self.schema is None


def make_workloads(*, quick: bool = False) -> dict[str, Workload]:
    """By letter; the same on every run.

    Args:
        quick: the same in small, which shows that an engine works and nothing else.
    """
    workloads = (_rag(), _unrelated(), _chats(), _one_stream(), _json(), _short())
    return {w.name: _shortened(w) if quick else w for w in workloads}


def _shortened(workload: Workload) -> Workload:
    """A few of its conversations, with shorter texts; answers that have to satisfy a schema keep their length."""
    conversations = [
        Conversation(
            str(each.context)[:QUICK_CHARACTERS],
            [
                Turn(
                    str(turn.question)[:QUICK_CHARACTERS],
                    turn.output_len if workload.schema else QUICK_OUTPUT,
                )
                for turn in each.turns[:2]
            ],
        )
        for each in workload.conversations[:QUICK_CONVERSATIONS]
    ]
    return replace(workload, what=f"{workload.what}, shortened", conversations=conversations)


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
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": ANSWER_SCHEMA, "strict": True},
    }
    return Workload(
        "e",
        "16 JSON-schema answers",
        [Conversation("", [Turn(text(64), 128)]) for _ in range(16)],
        8,
        "chat",
        {"response_format": response_format},
        ANSWER_SCHEMA,
    )


def _short() -> Workload:
    text = TextPrompts(np.random.default_rng(6))
    return Workload(
        "f",
        "64 short requests on the built-in model",
        [Conversation("", [Turn(text(16), 16)]) for _ in range(64)],
        16,
        built_in_model=True,
    )
