"""Sends requests of random tokens with the load generator of ``radixrt bench serve``."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

import httpx

from radixrt.bench.client import RequestRecord, Target, converse
from radixrt.bench.serve import Throttle, closed_loop
from radixrt.bench.workloads import Conversation, WorkloadSettings, make_workload

VOCABULARY = 300
"""Token ids of prompts are below it in every model."""
GIVE_UP_S = 300.0
CLIENTS = 64
"""HTTP clients: a request costs httpx time for every open connection of its client."""


class Load:
    """A client of one server. No two of its prompts share a page, but those of a ``shared-prefix``
    workload."""

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], url: str, model: str, first_seed: int
    ) -> None:
        self._clients = clients
        self._target = Target(f"{url}/v1", model, return_token_ids=True)
        self._url = url
        self._seeds: Iterator[int] = itertools.count(first_seed)

    async def send(
        self,
        count: int,
        pace: Throttle,
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
            groups: documents that the prompts share, each ``prefix_len`` tokens; 0: they share
                nothing.
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

        async def converse_once(number: int, conversation: Conversation) -> None:
            client = self._clients[number % len(self._clients)]
            async for record in converse(client, self._target, number, conversation):
                records.append(record)

        conversations = make_workload(settings, VOCABULARY)
        await pace([partial(converse_once, *each) for each in enumerate(conversations)])
        return records

    async def num_waiting(self) -> int:
        """Requests in the server's queue; asked with the key of an admin."""
        info = await self._clients[0].get(f"{self._url}/get_server_info")
        return int(info.raise_for_status().json()["stats"]["waiting"])

    async def flush_cache(self) -> None:
        """Empty the server's cache; nothing may run."""
        (await self._clients[0].post(f"{self._url}/flush_cache")).raise_for_status()

    @contextlib.asynccontextmanager
    async def always(
        self, concurrency: int, *, input_len: int, output_len: int
    ) -> AsyncIterator[list[RequestRecord]]:
        """Keep ``concurrency`` requests running; yields the records of those that ended."""
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
async def load_on(url: str, key: str = "", first_seed: int = 0) -> AsyncIterator[Load]:
    """A client of the server at this URL, which ends without ``/v1``; ``key`` is its API key."""
    headers = {"x-api-key": key} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(headers=headers, timeout=GIVE_UP_S, limits=limits, verify=False)
            )
            for _ in range(CLIENTS)
        ]
        models = (await clients[0].get(f"{url}/v1/models")).raise_for_status().json()
        yield Load(clients, url, models["data"][0]["id"], first_seed)


def require_all(records: list[RequestRecord]) -> list[RequestRecord]:
    """The records, none of which failed.

    Raises:
        RuntimeError: one did.
    """
    for record in records:
        if record.error:
            raise RuntimeError(f"A request failed: {record.error}")
    return records
