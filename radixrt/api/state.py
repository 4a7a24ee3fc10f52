"""What all endpoints share: the engine, what it can do, and the counters."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from radixrt.api.metrics import AnswerTimer, Metrics
from radixrt.config import ServerConfig
from radixrt.engine_client import EngineClient
from radixrt.errors import EngineDiedError, RequestError
from radixrt.messages import AnswerChunk, EngineInfo, GenerateRequest

DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling settings for which a checkpoint's generation_config.json may bring its own default."""


class ServerState:
    def __init__(self, config: ServerConfig, client: EngineClient, info: EngineInfo) -> None:
        self.config = config
        self.client = client
        self.info = info
        self.metrics = Metrics()
        self.started_at = int(time.time())
        self.default_sampling: dict[str, Any] = {
            name: value
            for name, value in info.default_sampling.items()
            if name in DEFAULTABLE and value is not None
        }

    def check_model(self, name: str | None) -> None:
        """Raises:
        RequestError: another model is asked for.
        """
        if name is not None and name != self.config.model_name:
            raise RequestError(
                f"The model {name!r} is not served here; this server has {self.config.model_name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def check_answer_count(self, num_prompts: int, n: int) -> None:
        """Raises:
        RequestError: one HTTP request asks for more answers than the queue can ever hold.
        """
        if num_prompts * n > self.config.max_queued_requests:
            raise RequestError(
                f"The request asks for {num_prompts * n} answers ({num_prompts} prompts, n={n}); this server takes "
                f"at most {self.config.max_queued_requests} in one request (--max-queued-requests)."
            )

    async def generate(
        self, requests: list[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
        """Run several requests at once; yield each chunk with the index of its request.

        When one fails, or the generator is closed, all are aborted.
        """
        if len(requests) == 1:
            async with aclosing(self._generate_one(requests[0])) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
            return
        arrivals: asyncio.Queue[tuple[int, AnswerChunk | Exception | None]] = asyncio.Queue()

        async def run(index: int) -> None:
            try:
                async with aclosing(self._generate_one(requests[index])) as chunks:
                    async for chunk in chunks:
                        arrivals.put_nowait((index, chunk))
                arrivals.put_nowait((index, None))
            except Exception as error:
                arrivals.put_nowait((index, error))

        tasks = [asyncio.create_task(run(index)) for index in range(len(requests))]
        try:
            unfinished = len(tasks)
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

    async def _generate_one(self, request: GenerateRequest) -> AsyncGenerator[AnswerChunk, None]:
        """The client's chunks, observed."""
        timer = AnswerTimer(self.metrics, request.stream)
        try:
            async with aclosing(self.client.generate(request)) as chunks:
                async for chunk in chunks:
                    timer.observe(chunk)
                    yield chunk
        except (RequestError, EngineDiedError):
            self.metrics.answers.labels("error").inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.answers.labels("client_left").inc()
            raise


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
