"""The forms of what engines are asked: workloads of conversations, and those whose answers are judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixrt.bench.arguments import EndpointName
from radixrt.bench.workloads import Conversation


@dataclass(frozen=True)
class Task(Conversation):
    """A conversation whose answers end by themselves and are judged."""

    schema: dict[str, Any] | None = None
    """Of every answer."""
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
