"""Sends requests of random tokens to a server, with the load generator of ``radixrt bench serve``."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import httpx

from radixrt.bench.client import RequestRecord, Target
from radixrt.bench.serve import Pace, closed_loop, send_all
from radixrt.bench.workloads import WorkloadSettings, make_workload

VOCABULARY = 300
"""Token ids of prompts are below it in every model."""
GIVE_UP_S = 300.0


class Load:
    """A client of one server. No two of its prompts share a page, but those of a ``shared-prefix`` workload."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str) -> None:
        self._client = client
        self._target = Target(f"{url}/v1", model, return_token_ids=True)
        self._url = url
        self._seeds: Iterator[int] = itertools.count()

    async def send(
        self,
        count: int,
        pace: Pace,
        *,
        input_len: int,
        output_len: int,
        groups: int = 0,
        prefix_len: int = 0,
    ) -> list[RequestRecord]:
        """Send ``count`` requests, and wait for their ends.

        Args:
            count: of the requests.
            pace: when they start.
            input_len: tokens of a prompt, or of its part that no other has.
            output_len: tokens of an answer.
            groups: documents that the prompts share, each ``prefix_len`` tokens; 0: they share nothing.
            prefix_len: tokens of a document.
        """
        settings = WorkloadSettings(
            name="shared-prefix" if groups else "random",
            num_prompts=count,
            input_len=input_len,
            output_len=output_len,
            length_spread=0.0,
            prefix_len=prefix_len,
            groups=groups,
            turns=1,
            seed=next(self._seeds),
        )
        records: list[RequestRecord] = []
        conversations = make_workload(settings, VOCABULARY)
        await send_all(self._client, self._target, conversations, pace, records.append)
        return records

    async def flush_cache(self) -> None:
        """Empty the server's cache; nothing may run."""
        (await self._client.post(f"{self._url}/flush_cache")).raise_for_status()

    @contextlib.asynccontextmanager
    async def always(
        self, concurrency: int, *, input_len: int, output_len: int
    ) -> AsyncIterator[list[RequestRecord]]:
        """Keep ``concurrency`` requests running until the block ends; yields the records of those that have ended."""
        records: list[RequestRecord] = []

        async def one_after_the_other() -> None:
            while True:
                records.extend(
                    await self.send(1, closed_loop(1), input_len=input_len, output_len=output_len)
                )

        tasks = [asyncio.create_task(one_after_the_other()) for _ in range(concurrency)]
        try:
            yield records
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def load_on(url: str) -> AsyncIterator[Load]:
    """A client of the server at this URL, which ends without ``/v1``."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=GIVE_UP_S, limits=limits) as client:
        models = (await client.get(f"{url}/v1/models")).raise_for_status().json()
        yield Load(client, url, models["data"][0]["id"])


def require_all(records: list[RequestRecord]) -> list[RequestRecord]:
    """The records, none of which failed.

    Raises:
        RuntimeError: one did.
    """
    for record in records:
        if record.error:
            raise RuntimeError(f"A request failed: {record.error}")
    return records
