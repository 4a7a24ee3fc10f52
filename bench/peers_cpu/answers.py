"""Counts the answers that satisfy their schema, with jsonschema, which no engine uses to generate."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from radixrt.bench.client import RequestRecord


@dataclass(frozen=True)
class JudgedAnswers:
    """Of all requests of a run."""

    asked: int
    finished: int
    """Ended by themselves, as the server said, and not at the limit of tokens."""
    valid: int
    """JSON that satisfies the schema."""

    @staticmethod
    def of(records: Sequence[RequestRecord], schema: dict[str, Any]) -> "JudgedAnswers":
        """Judge the answers' texts; a request that failed has no answer."""
        good = [record for record in records if not record.error]
        return JudgedAnswers(
            asked=len(records),
            finished=sum(record.finish_reason == "stop" for record in good),
            valid=sum(is_valid(record.answer, schema) for record in good),
        )


def is_valid(answer: str, schema: dict[str, Any]) -> bool:
    """Whether it is one JSON value, strictly, that satisfies the schema."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(value)
