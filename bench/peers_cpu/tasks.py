"""What engines are asked, and whether their answers are valid and right.

Answers are held to their schemas by jsonschema, which no engine uses to generate.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from radixrt.bench.arguments import EndpointName
from radixrt.bench.client import RequestRecord
from radixrt.bench.workloads import Conversation


@dataclass(frozen=True)
class Task(Conversation):
    """A conversation whose answers end by themselves and are judged."""

    schema: dict[str, Any] | None = None
    """The schema of every answer."""
    right: tuple[str, ...] = ()
    """The right answer of each turn; empty: nobody knows."""


@dataclass(frozen=True)
class Workload:
    """Lengths are approximate numbers of tokens; the report has the counts of the servers."""

    name: str
    """A letter, and perhaps more for a variant."""
    what: str
    conversations: Sequence[Conversation]
    concurrency: int
    endpoint: EndpointName = "completions"
    built_in_model: bool = False


@dataclass(frozen=True)
class JudgedAnswers:
    """The answers of all requests of a run."""

    asked: int
    finished: int
    """Ended by themselves, as the server said, not at the limit of tokens."""
    valid: int | None
    """JSON that satisfies the schema; None: there is none."""
    right: int | None
    """None: nobody knows."""

    @staticmethod
    def judge(records: Sequence[RequestRecord], tasks: Sequence[Task]) -> "JudgedAnswers":
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
