"""State that all endpoints share: the engine's client, the requests in flight, the metrics."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from radixrt import __version__
from radixrt.api.conversations.store import ConversationStore
from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.http.keys import Caller, Keys
from radixrt.api.metrics import AnswerTimer, Metrics
from radixrt.api.request_group import RequestGroup
from radixrt.base.config import ServerConfig
from radixrt.base.errors import EngineDiedError, RequestError, shown
from radixrt.client.engine_client import EngineClient
from radixrt.client.open_requests import id_in_use
from radixrt.messages.answers import AnswerChunk, EngineInfo
from radixrt.messages.ids import num_ids
from radixrt.messages.requests import GenerateRequest, Tenant

KEPT_CONVERSATIONS_TTL_S = 3600.0

DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling settings for which a checkpoint's generation_config.json may bring its own default."""


class ServerState:
    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        info: EngineInfo,
        keys: Keys | None = None,
    ) -> None:
        self.keys = keys or Keys()
        self.config = config
        self.client = client
        self.info = info
        self.metrics = Metrics(config, info)
        self.conversations = ConversationStore(
            config.kept_conversations_mb << 20, KEPT_CONVERSATIONS_TTL_S
        )
        self._groups: dict[tuple[str, str], RequestGroup] = {}
        """Of the HTTP requests in flight, by the name of their key and their ids."""
        self.json_bounds = JsonBounds()
        self.started_at = int(time.time())
        self.is_draining = False
        """A signal to stop has come: open requests are answered, new ones refused."""
        self.fingerprint = _fingerprint(config, info)
        """Of what answers depend on beside the request, as ``system_fingerprint``."""
        self.default_sampling: dict[str, Any] = {
            name: value
            for name, value in info.default_sampling.items()
            if name in DEFAULTABLE and value is not None
        }

    def check_model(self, name: str | None) -> None:
        """Raises:
        RequestError: another model is asked for.
        """
        if name is not None and name not in self.config.model_names:
            raise RequestError(
                f"The model {shown(name)} is not served here; this server has {self.config.model_name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    @property
    def num_open(self) -> int:
        """HTTP requests that compute an answer."""
        return len(self._groups)

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
        self, requests: list[GenerateRequest], constraint_field: str = ""
    ) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
        """Run the prompts of one HTTP request; yield each chunk with the index of its prompt.

        When one fails, or the generator is closed, all are aborted.

        Args:
            constraint_field: the field of the HTTP request that errors about the constraint name.

        Raises:
            RequestError: the request's id is in use, or a prompt was refused or lost.
            EngineDiedError: the engine ended.
        """
        tenant = requests[0].options.tenant
        check_max_tokens(requests, tenant)
        use = self.keys.use_of(tenant)
        most_running = min(
            self.info.max_running_requests, use.limits.max_parallel_requests or math.inf
        )
        group = RequestGroup(self.client, requests, int(most_running))
        timers = [AnswerTimer(self.metrics, request.stream) for request in requests]
        begun: set[int] = set()
        try:
            with self._registered(group), constraint_errors_name(constraint_field):
                async with aclosing(group.run()) as chunks:
                    async for index, chunk in chunks:
                        timers[index].observe(chunk)
                        prompt_tokens = 0 if index in begun else chunk.report.prompt_tokens
                        begun.add(index)
                        use.count_tokens(prompt_tokens + num_ids(chunk.token_ids))
                        yield index, chunk
        except (RequestError, EngineDiedError):
            self.metrics.answers.labels("error").inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.answers.labels("client_left").inc()
            raise

    async def run(self, requests: list[GenerateRequest]) -> list[AnswerChunk]:
        """As :meth:`generate`, for requests of one answer each that do not stream: the one chunk of each."""
        found: dict[int, AnswerChunk] = {}
        async with aclosing(self.generate(requests)) as chunks:
            async for index, chunk in chunks:
                found[index] = chunk
        return [found[index] for index in range(len(requests))]

    def abort(self, name: str, caller: Caller) -> None:
        """Drop the caller's HTTP request of this id, or one prompt of it. An unknown id is ignored."""
        if group := self._groups.get((caller.tenant.name, name)):
            group.abort()
        else:
            self.client.abort(name, caller.tenant)

    def abort_all(self) -> None:
        """Drop every request."""
        for group in self._groups.values():
            group.abort()

    @contextmanager
    def _registered(self, group: RequestGroup) -> Iterator[None]:
        """Let ``abort`` find a group while it runs."""
        key = group.tenant.name, group.id
        if key in self._groups:
            raise id_in_use(group.id)
        self._groups[key] = group
        try:
            yield
        finally:
            del self._groups[key]


def check_max_tokens(requests: list[GenerateRequest], tenant: Tenant) -> None:
    """Raises:
    RequestError: a request asks for longer answers than its key may get. OpenAI's API refuses them too; an answer that is
        cut off without notice would be worse.
    """
    most = tenant.max_tokens
    asked = max(request.sampling.max_tokens or 0 for request in requests)
    if most is not None and asked > most:
        raise RequestError(
            f"max_tokens is {asked}; this API key gets at most {most} tokens an answer.",
            param="max_tokens",
        )


def _fingerprint(config: ServerConfig, info: EngineInfo) -> str:
    parts = (__version__, config.model_path, config.quantization, info.dtype, info.device)
    return f"fp_{hashlib.blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"


@contextmanager
def constraint_errors_name(field: str) -> Iterator[None]:
    """Let errors about a constraint name the field of the request."""
    try:
        yield
    except RequestError as error:
        if error.param == "structured" and field:
            error.param = field
        raise
