"""Judges answers: those that satisfy their schema, by jsonschema, which no engine uses to generate, and those that are right."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from bench.peers_cpu.tasks import Task
from radixrt.bench.client import RequestRecord


@dataclass(frozen=True)
class JudgedAnswers:
    """Of all requests of a run."""

    asked: int
    finished: int
    """Ended by themselves, as the server said, and not at the limit of tokens."""
    valid: int | None
    """JSON that satisfies the schema; None: there is none."""
    right: int | None
    """None: nobody knows."""

    @staticmethod
    def of(records: Sequence[RequestRecord], tasks: Sequence[Task]) -> "JudgedAnswers":
        """Judge the answers' texts; a request that failed has no answer."""
        good = [(record, tasks[record.conversation]) for record in records if not record.error]
        with_schema = [(record, task.schema) for record, task in good if task.schema]
        known = [(record, task.right[record.turn]) for record, task in good if task.right]
        return JudgedAnswers(
            asked=len(records),
            finished=sum(record.finish_reason == "stop" for record, _ in good),
            valid=sum(is_valid(record.answer, schema) for record, schema in with_schema)
            if any(task.schema for task in tasks)
            else None,
            right=sum(is_right(record.answer, right) for record, right in known)
            if any(task.right for task in tasks)
            else None,
        )


def is_valid(answer: str, schema: dict[str, Any]) -> bool:
    """Whether it is one JSON value, strictly, that satisfies the schema."""
    value = _parsed(answer)
    return value is not None and jsonschema.Draft202012Validator(schema).is_valid(value)


def is_right(answer: str, right: str) -> bool:
    """Whether it is the same text but for spaces around it, or the same JSON value."""
    value = _parsed(right)
    return answer.strip() == right if value is None else _parsed(answer) == value


def _parsed(text: str) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
