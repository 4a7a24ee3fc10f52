"""State that all endpoints share: the engine's client, the requests in flight, the metrics."""

import asyncio
import hashlib
import math
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request

from radixrt import __version__
from radixrt.api.conversations.open_prompts import OpenPrompts
from radixrt.api.conversations.store import ConversationStore
from radixrt.api.http.events import while_connected
from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.http.keys import Caller, Keys
from radixrt.api.http.middleware import new_id
from radixrt.api.metrics import AnswerTimer, Metrics
from radixrt.base.config import ServerConfig
from radixrt.base.errors import EngineDiedError, RequestError, shown, wrong
from radixrt.client.answers import Answers
from radixrt.client.engine_client import EngineClient
from radixrt.client.open_requests import id_in_use
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import AnswerChunk, EngineInfo
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import Call, ReleaseCacheCall, Reply
from radixrt.messages.requests import GenerateRequest, RequestOptions, Tenant

Result = TypeVar("Result")

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
        conversations: ConversationStore | None = None,
    ) -> None:
        """
        Args:
            conversations: shared with other models; None: the model has its own.
        """
        self.keys = keys or Keys()
        self.is_one_of_several = conversations is not None
        self.config = config
        self.client = client
        self.info = info
        self.metrics = Metrics(config, info)
        if conversations is None:
            conversations = ConversationStore(
                config.kept_conversations_mb << 20, KEPT_CONVERSATIONS_TTL_S
            )
        self.conversations = conversations
        self.prompts = OpenPrompts(lambda request: self.run([request]), self._release_session)
        self._open: dict[tuple[str, str], Answers] = {}
        """The answers of the HTTP requests in flight, by the name of their key and their ids."""
        self.json_bounds = JsonBounds()
        self.started_at = int(time.time())
        self.live_streams = {True: 0, False: 0}
        """Open streams of ``/v1/live``, of admins and of others."""
        self.is_draining = False
        """A signal to stop has come: open requests are answered, new ones refused."""
        self.fingerprint = _fingerprint(config, info)
        """``system_fingerprint``: a digest of all that answers depend on beside the request."""
        self.default_sampling: dict[str, Any] = {
            name: value
            for name, value in info.default_sampling.items()
            if name in DEFAULTABLE and value is not None
        }

    def adapter_of(self, name: str | None) -> AdapterInfo | None:
        """The adapter that a request asks for as its model, ``NAME`` or ``MODEL:NAME``; None: the
        base model.

        Raises:
            RequestError: there is no such model, or not any more.
        """
        if name is None or name in self.config.model_names:
            return None
        own = self.config.name_behind_base(name)
        names = (name,) if own is None else (name, own)
        adapters = self.client.adapters
        found = next((adapters[one] for one in names if one in adapters), None)
        if found is None and not self.client.lost_adapters.isdisjoint(names):
            raise RequestError(
                f"The adapter {shown(name)} is not loaded any more: it could not be read when the engine was started "
                "again. Load it again.",
                status=503,
                param="model",
            )
        if found is None:
            raise RequestError(
                f"The model {shown(name)} is not served here; this server has "
                f"{', '.join(map(repr, [self.config.model_name, *adapters]))}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return found

    @property
    def num_open(self) -> int:
        """HTTP requests that compute an answer."""
        return len(self._open)

    @contextmanager
    def answers(
        self, requests: list[GenerateRequest], constraint_field: str = ""
    ) -> Iterator[Answers]:
        """Run the prompts of one HTTP request, some at a time, so that the rest does not stand in
        the queue before the requests of others. When one fails, or the context is left early, all
        are aborted.

        Args:
            constraint_field: the field of the HTTP request that errors about the constraint name.

        Raises:
            RequestError: the request's id is in use, or a prompt was refused or lost.
            EngineDiedError: the engine ended.
        """
        tenant = requests[0].options.tenant
        check_max_tokens(requests, tenant)
        use = self.keys.use_of(tenant)
        max_running = min(
            self.info.max_running_requests, use.limits.max_parallel_requests or math.inf
        )
        max_answers = max(request.sampling.n for request in requests)
        max_concurrency = min(max(1, int(max_running) // max_answers), len(requests))
        timers = [
            AnswerTimer(self.metrics, request.stream, use.count_tokens) for request in requests
        ]
        answers = self.client.open(
            _grouped(requests, max_concurrency),
            max_concurrency,
            lambda prompt_index, chunk: timers[prompt_index].observe(chunk),
        )
        name = requests[0].group_id or requests[0].request_id
        try:
            with (
                errors_name(constraint_field, "structured"),
                self._registered(tenant, name, answers),
                answers,
            ):
                yield answers
        except (RequestError, EngineDiedError):
            self.metrics.answers.labels("error").inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.answers.labels("client_left").inc()
            raise

    async def _release_session(self, options: RequestOptions) -> int:
        """Let the KV of a session be evicted first."""
        session = options.cache_hints.session
        return await self.client.call(ReleaseCacheCall(session=session, root=options.root))

    async def run(self, requests: list[GenerateRequest]) -> list[AnswerChunk]:
        """Run requests of one answer each that do not stream; returns the one chunk of each."""
        with self.answers(requests) as answers:
            found = {prompt_index: chunk async for prompt_index, chunk in answers}
        return [found[prompt_index] for prompt_index in range(len(requests))]

    async def drain(self, grace_s: float, reason: str) -> None:
        """Wait until no request is open. Those that are after ``grace_s`` end with an error that
        says the reason."""
        await self.client.drain(grace_s, reason)

    def abort(self, name: str, caller: Caller) -> None:
        """Drop the caller's HTTP request of this id, or one prompt of it. An unknown id is
        ignored."""
        if answers := self._open.get((caller.tenant.name, name)):
            answers.abort()
        else:
            self.client.abort(name, caller.tenant)

    def abort_all(self) -> None:
        """Drop every request."""
        for answers in self._open.values():
            answers.abort()

    @contextmanager
    def _registered(self, tenant: Tenant, name: str, answers: Answers) -> Iterator[None]:
        """Let ``abort`` find a request while it runs."""
        key = tenant.name, name
        if key in self._open:
            raise id_in_use(name)
        self._open[key] = answers
        try:
            yield
        finally:
            del self._open[key]


def _grouped(requests: list[GenerateRequest], max_concurrency: int) -> list[GenerateRequest]:
    """The requests as one group, under a new id: clients choose the ids of requests, also one
    twice."""
    size = sum(request.sampling.n for request in requests[:max_concurrency])
    group = new_id("group")
    return [msgspec.structs.replace(one, group_id=group, group_size=size) for one in requests]


def check_max_tokens(requests: list[GenerateRequest], tenant: Tenant) -> None:
    """Raises RequestError if a request asks for longer answers than its key may get. OpenAI's API
    refuses them too; an answer that is cut off without notice would be worse."""
    limit = tenant.max_tokens
    asked = max(request.sampling.max_tokens or 0 for request in requests)
    if limit is not None and asked > limit:
        raise wrong("max_tokens", f"is {asked}; this API key gets at most {limit} tokens an answer")


def _fingerprint(config: ServerConfig, info: EngineInfo) -> str:
    parts = (__version__, config.model_path, config.quantization, info.dtype, info.device)
    return f"fp_{hashlib.blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"


@dataclass(frozen=True)
class Context:
    """An HTTP request that is being answered, and the state of its server."""

    request: Request
    state: ServerState

    @property
    def caller(self) -> Caller:
        """The caller, as :meth:`Keys.caller` has found it."""
        caller: Caller = self.request.state.caller
        return caller

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter that the request asks for; None: the base model."""
        return getattr(self.request.state, "adapter", None)

    @property
    def model_name(self) -> str:
        """The name that answers have: that of the adapter, or of the model."""
        return self.state.config.model_name if self.adapter is None else self.adapter.name

    def root(self, cache_salt: str | None) -> CacheRoot:
        """The cache root of a request that brings this salt."""
        return self.tenant.root(cache_salt, "" if self.adapter is None else self.adapter.digest)

    def name(self, request_id: str) -> str:
        """Give the response an id, which its ``X-Request-Id`` has; returns it."""
        self.request.state.request_id = request_id
        return request_id

    async def call(self, call: Call[Reply]) -> Reply:
        """The engine's reply to a call."""
        return await self.state.client.call(call)

    async def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """:func:`radixrt.api.http.events.while_connected`."""
        return await while_connected(self.request, work)


async def context_of(request: Request) -> Context:
    return Context(request, request.app.state.server)


Here = Annotated[Context, Depends(context_of)]
"""The context, as a parameter of an endpoint without a body."""


@contextmanager
def errors_name(field: str, internal: str) -> Iterator[None]:
    """Let errors about an internal field name the field of the request.

    Args:
        internal: "structured", a constraint; or "prompt".
    """
    try:
        yield
    except RequestError as error:
        if error.param == internal and field:
            error.param = field
        raise
