"""Runs the prompts of one HTTP request: some at a time, so that other requests are not held up."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from radixrt.api.http.middleware import new_id
from radixrt.base.errors import RequestError
from radixrt.client.engine_client import EngineClient
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import GenerateRequest

_MOST_UNREAD = 64
"""Most chunks taken from the engine's client ahead of the reader."""


class RequestGroup:
    """The prompts of one HTTP request.

    Attributes:
        id: of all of them together.
        tenant: whose requests they are.
    """

    def __init__(
        self, client: EngineClient, requests: list[GenerateRequest], most_running: int
    ) -> None:
        """
        Args:
            most_running: most answers that the engine computes at once. No more are submitted: the rest
                would stand in the queue before the requests of others.
        """
        most_answers = max(request.sampling.n for request in requests)
        self.id = requests[0].group_id or requests[0].request_id
        self.tenant = requests[0].options.tenant
        self._client = client
        self._at_once = min(max(1, most_running // most_answers), len(requests))
        self._requests = _grouped(requests, self._at_once)
        self._waiting = iter(enumerate(self._requests))
        self._aborted = False

    async def run(self) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
        """Yield each chunk with the index of its prompt. When one prompt fails, or the generator is
        closed, all are aborted."""
        if len(self._requests) == 1:
            async with aclosing(self._client.generate(self._requests[0])) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
            return
        arrivals: asyncio.Queue[tuple[int, AnswerChunk | Exception | None]] = asyncio.Queue(
            _MOST_UNREAD
        )
        tasks = [asyncio.create_task(self._run_waiting(arrivals)) for _ in range(self._at_once)]
        try:
            unfinished = len(self._requests)
            while unfinished:
                index, arrival = await arrivals.get()
                if isinstance(arrival, Exception):
                    raise arrival
                if arrival is None:
                    unfinished -= 1
                else:
                    yield index, arrival
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self) -> None:
        """End all answers where they are, with finish reason "abort". If a prompt has not begun, :meth:`run` raises a RequestError."""
        self._aborted = True
        for request in self._requests:
            self._client.abort(request.request_id, self.tenant)

    async def _run_waiting(
        self, arrivals: asyncio.Queue[tuple[int, AnswerChunk | Exception | None]]
    ) -> None:
        """Run one prompt after the other, as long as some wait."""
        for index, request in self._waiting:
            try:
                if self._aborted:
                    raise RequestError(
                        "The request was aborted before all of it had begun.",
                        code="request_aborted",
                    )
                async with aclosing(self._client.generate(request)) as chunks:
                    async for chunk in chunks:
                        await arrivals.put((index, chunk))
                await arrivals.put((index, None))
            except Exception as error:
                await arrivals.put((index, error))
                return


def _grouped(requests: list[GenerateRequest], at_once: int) -> list[GenerateRequest]:
    """The requests as one group, under a new id: clients choose the ids of requests, also one twice."""
    group, size = new_id("group"), sum(request.sampling.n for request in requests[:at_once])
    return [msgspec.structs.replace(one, group_id=group, group_size=size) for one in requests]
