"""One run of one workload against one server, as its client sees it."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from bench.peers_cpu.workloads import Workload
from radixrt.bench.client import RequestRecord, Target, converse
from radixrt.bench.report import Summary, summarize
from radixrt.bench.workloads import Prompt

TIMEOUT_S = 900


@dataclass(frozen=True)
class PeerTarget(Target):
    """Asks for the workload's own fields too."""

    extra: dict[str, Any] | None = None

    def body(self, history: list[Prompt], output_len: int) -> dict[str, Any]:
        return {**super().body(history, output_len), **(self.extra or {})}


async def run(base_url: str, model_name: str, workload: Workload) -> Summary:
    """Send all conversations, ``concurrency`` at a time."""
    target = PeerTarget(
        base_url,
        model_name,
        endpoint=workload.endpoint,  # type: ignore[arg-type]
        ignore_eos=workload.ignore_eos,
        extra=workload.extra,
    )
    waiting = iter(enumerate(workload.conversations))
    records: list[RequestRecord] = []

    async def client_loop(client: httpx.AsyncClient) -> None:
        for number, conversation in waiting:
            async for record in converse(client, target, number, conversation):
                records.append(record)

    limits = httpx.Limits(max_connections=workload.concurrency)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(workload.concurrency)))
    return summarize(records)
