"""One run of one workload against one server, as its client sees it."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import httpx

from bench.local_server import check_computed
from bench.peers_cpu.engines import Engine
from bench.peers_cpu.tasks import JudgedAnswers, Task, Workload
from radixrt.bench.client import RequestRecord, Target, converse
from radixrt.bench.report import Summary, summarize
from radixrt.bench.workloads import Prompt

TIMEOUT_S = 900


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    summary: Summary
    answers: JudgedAnswers | None
    """Answers to a workload of tasks."""


@dataclass(frozen=True)
class PeerTarget(Target):
    """Asks for JSON of a schema too."""

    schema: dict[str, Any] | None = None

    def body(self, history: list[Prompt], output_len: int) -> dict[str, Any]:
        body = super().body(history, output_len)
        if self.schema:
            json_schema = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return body


async def measure(base_url: str, engine: Engine, workload: Workload) -> Run:
    """Warm up, then send all conversations, ``concurrency`` at a time."""
    await _converse_all(base_url, engine, _warmup(workload))
    records = await _converse_all(base_url, engine, workload)
    for record in records:
        check_computed({"replayed_tokens": record.replayed_tokens})
    tasks = [each for each in workload.conversations if isinstance(each, Task)]
    return Run(summarize(records), JudgedAnswers.judge(records, tasks) if tasks else None)


def _warmup(workload: Workload) -> Workload:
    """One conversation of the same form that shares no text with the others."""
    first = workload.conversations[0]
    turns = [replace(turn, question=f"warm up {turn.question}") for turn in first.turns[:2]]
    context = f"warm up {first.context}" if first.context else ""
    return replace(workload, conversations=[replace(first, context=context, turns=turns)])


async def _converse_all(base_url: str, engine: Engine, workload: Workload) -> list[RequestRecord]:
    waiting = iter(enumerate(workload.conversations))
    records: list[RequestRecord] = []

    async def client_loop(client: httpx.AsyncClient) -> None:
        for number, conversation in waiting:
            task = conversation if isinstance(conversation, Task) else None
            target = PeerTarget(
                base_url,
                "model",
                endpoint=workload.endpoint,
                ignore_eos=task is None,
                return_token_ids=engine.names_token_ids,
                schema=task.schema if task else None,
            )
            async for record in converse(client, target, number, conversation):
                records.append(record)

    limits = httpx.Limits(
        max_connections=workload.concurrency,
        max_keepalive_connections=None if engine.keeps_connections else 0,
    )
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(workload.concurrency)))
    return records
