"""Asynchronous client of a running engine. The api process and the offline ``LLM`` both use it."""

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from radixrt.base.channels import Channels
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.base.ipc import AsyncInbox, FrameTooLargeError, Outbox
from radixrt.base.liveness.link import StartReplica, SupervisorLink
from radixrt.base.liveness.supervision import OnFailure, supervise
from radixrt.client.answers import Answers
from radixrt.client.leases import ClientLeases
from radixrt.client.open_requests import OpenRequest, OpenRequests
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import AnswerBatch, AnswerChunk, EngineInfo, RequestFailed
from radixrt.messages.calls import (
    AnyCall,
    Call,
    CallReply,
    LoadAdapterCall,
    PinCall,
    ReleaseCacheCall,
    Reply,
    StatsCall,
    UnloadAdapterCall,
)
from radixrt.messages.links import ToApi
from radixrt.messages.replicas import RequestsLost
from radixrt.messages.requests import NO_TENANT, AbortRequest, GenerateRequest, Tenant
from radixrt.messages.stats import SchedulerStats

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2

MAX_DEATHS_OF_A_CALL = 2
"""A call is asked again once: should it kill engines, it ends before the server does."""


@dataclass(eq=False)
class _OpenCall:
    """A call without a reply."""

    message: AnyCall
    reply: asyncio.Future[Any]
    was_sent: bool = False
    """Whether it was sent to the engine that lives, or lived last."""
    deaths: int = 0
    """Engines that died while they had it."""

    @property
    def may_be_repeated(self) -> bool:
        """A new engine would give the reply that the old one would have given; a pinned prompt is
        not in its tree."""
        return not isinstance(self.message, PinCall) and self.deaths < MAX_DEATHS_OF_A_CALL


class OpenCalls:
    """All open calls of a client.

    Args:
        send: to the engine; raises a RequestError if the call cannot be sent, an EngineDiedError if
            no engine will follow.
        engine_is_alive: calls that come while it is not wait for :meth:`take_over`.
    """

    def __init__(
        self, send: Callable[[AnyCall], None], engine_is_alive: Callable[[], bool]
    ) -> None:
        self._send = send
        self._engine_is_alive = engine_is_alive
        self._by_id: dict[int, _OpenCall] = {}
        self._new_id = itertools.count()

    async def ask(self, call: Call[Reply]) -> Reply:
        """Send a call and wait for its reply.

        Raises:
            RequestError: the reply is an error.
            EngineDiedError: the engine ended.
        """
        call_id = next(self._new_id)
        reply = asyncio.get_running_loop().create_future()
        opened = self._by_id[call_id] = _OpenCall(replace(call, call_id=call_id), reply)
        try:
            self._dispatch(opened)
            return msgspec.convert(await reply, call.reply_type())
        finally:
            del self._by_id[call_id]

    def send(self, call: AnyCall) -> None:
        """Send a call whose reply nobody needs."""
        self._send(replace(call, call_id=next(self._new_id)))

    def take(self, reply: CallReply) -> None:
        """Hand a reply to the call that waits for it, if one does."""
        call = self._by_id.get(reply.call_id)
        if call is None or call.reply.done():
            return
        if reply.error is not None:
            call.reply.set_exception(reply.error.as_error())
        else:
            call.reply.set_result(reply.value)

    def take_over(self) -> None:
        """Ask a new engine what the dead one has not answered."""
        for call in self._by_id.values():
            call.deaths += call.was_sent
            if call.reply.done():
                continue
            try:
                if not call.may_be_repeated:
                    raise RequestError(
                        "The engine was restarted before it answered; ask again.",
                        status=503,
                        retry_after_s=RETRY_AFTER_S,
                    )
                self._dispatch(call)
            except Exception as error:  # it may hold what can't be sent
                call.reply.set_exception(error)

    def fail(self, error: RequestError | EngineDiedError) -> None:
        """End all of them with an error."""
        for call in self._by_id.values():
            if not call.reply.done():
                call.reply.set_exception(error)

    def _dispatch(self, call: _OpenCall) -> None:
        call.was_sent = self._engine_is_alive()
        if call.was_sent:
            self._send(call.message)


DRAIN_LOOK_S = 0.05


RunRequests = Callable[[list[GenerateRequest]], Awaitable[list[AnswerChunk]]]
"""Runs requests of one answer each, which do not stream, side by side; returns the one chunk of
each."""


class EngineClient:
    """One end of the link to the tokenizer process. Make it inside a running event loop, and use it
    only there.

    Example::

        client = EngineClient(channels)  # of radixrt.base.ipc await client.ready() prompt =
        TextPrompt("Once upon a time") async for chunk in
        client.generate(GenerateRequest(request_id="1", prompt=prompt, stream=True)):
            print(chunk.text, end="")
        tokenized = await client.call(TokenizeCall(prompt))
    """

    def __init__(
        self,
        channels: Channels,
        max_buffered: float = math.inf,
        random_seed: int = 0,
        on_failure: OnFailure | None = None,
        supervisor: SupervisorLink | None = None,
    ) -> None:
        """
        Args:
            max_buffered: chunks of an answer that may wait for a slow reader; beyond it the request
                is aborted.
            random_seed: of the seeds of requests that bring none.
            on_failure: called if the client can receive nothing any more; None: it lets all
                requests fail.
            supervisor: None: it starts no further engine.
        """
        self._channels = channels
        self._supervisor = supervisor or SupervisorLink()
        self._inbox: AsyncInbox[ToApi] = AsyncInbox(channels.address("tokenizer", "api"), ToApi)
        self._outbox = Outbox(channels.address("api", "tokenizer"))
        self._max_buffered = max_buffered
        loop = asyncio.get_running_loop()
        self._info: asyncio.Future[EngineInfo] = loop.create_future()
        self._open = OpenRequests(self._send, lambda: self._engine_is_alive)
        self._seeds = random.Random(random_seed)
        self._calls = OpenCalls(self._send, lambda: self._engine_is_alive or self._died is not None)
        self._leases = ClientLeases(
            lambda request: self.run([request]), self._calls.ask, self._calls.send
        )
        self._handlers: dict[type[AnyCall], Callable[[Any], Awaitable[Any]]] = {
            PinCall: self._leases.pin,
            ReleaseCacheCall: self._leases.release,
            StatsCall: self._stats,
            LoadAdapterCall: self._load_adapter,
            UnloadAdapterCall: self._unload_adapter,
        }
        """The calls to which the client adds something; the engine alone answers the others."""
        self.adapters: dict[str, AdapterInfo] = {}
        """The loaded LoRA adapters by name."""
        self.lost_adapters: set[str] = set()
        """Names of adapters that an engine had, and the next one could not load."""
        self._adapter_calls = asyncio.Lock()
        """Held by one load or unload at a time: what a failed load takes back is its own."""
        self._died: EngineDiedError | None = None
        self._unloaded = ""
        """Why there is no engine, if the model is not loaded."""
        self._receiving = loop.create_task(self._receive())
        what = "The receiving of the engine's messages"
        supervise(self._receiving, what, on_failure or self.engine_died)

    @property
    def engine(self) -> int:
        """Number of the engine that this client uses, counted from the start of the server."""
        return self._channels.engine

    async def ready(self) -> EngineInfo:
        """Wait until the engine can take requests."""
        return await asyncio.shield(self._info)

    def unload(self, why: str) -> None:
        """The model is unloaded, or could not be loaded: requests and calls that are open end with
        an error. :meth:`ready` waits for the next engine.

        Args:
            why: for them, and for calls that come before it is loaded again.
        """
        if self._info.done():
            self._info = asyncio.get_running_loop().create_future()
        self._unloaded = why
        error = RequestError(why, status=503, retry_after_s=RETRY_AFTER_S)
        self._open.fail(error)
        self._calls.fail(error)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the chunks of all ``n`` answers until each is complete.

        Closing the iterator, or cancelling the task in it, aborts the request.

        Raises:
            RequestError: the request was refused, or was lost, or its reader is too slow.
            EngineDiedError: the engine ended.
        """
        with self.open([request]) as answers:
            async for _, chunk in answers:
                yield chunk

    def open(
        self,
        requests: Sequence[GenerateRequest],
        max_concurrency: int = 1 << 31,
        on_chunk: Callable[[int, AnswerChunk], None] = lambda number, chunk: None,
    ) -> Answers:
        """The chunks of the answers to some requests, which either all stream or none does; see
        :class:`Answers`.

        Args:
            max_concurrency: requests in flight; the others wait here.
            on_chunk: called with the index of its request and each chunk.
        """
        max_buffered = math.inf
        if requests and requests[0].stream:
            max_answers = max(request.sampling.n for request in requests)
            max_buffered = self._max_buffered * max_answers * min(max_concurrency, len(requests))
        return Answers(
            self._open,
            self._abort,
            map(self._with_seed, requests),
            max_concurrency=max_concurrency,
            max_buffered=max_buffered,
            on_chunk=on_chunk,
        )

    def _with_seed(self, request: GenerateRequest) -> GenerateRequest:
        """A request that draws gets its seed here, so that another engine would draw the same. An
        answer to one without a seed is never given to another."""
        sampling = request.sampling
        if sampling.seed is not None or not sampling.temperature:
            return request
        sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        options = msgspec.structs.replace(request.options, sampling=sampling, shares_answers=False)
        return msgspec.structs.replace(request, options=options)

    async def answers(
        self,
        requests: Sequence[GenerateRequest],
        max_concurrency: int = 1 << 31,
        on_chunk: Callable[[int, AnswerChunk], None] = lambda number, chunk: None,
    ) -> list[list[AnswerChunk]]:
        """As :meth:`open`; returns the chunks of each request. The first that fails aborts all of
        them.

        Raises:
            RequestError: a request was refused, or was lost.
            EngineDiedError: the engine ended.
        """
        found: list[list[AnswerChunk]] = [[] for _ in requests]
        with self.open(requests, max_concurrency, on_chunk) as answers:
            async for number, chunk in answers:
                found[number].append(chunk)
        return found

    async def run(
        self, requests: list[GenerateRequest], max_concurrency: int = 1 << 31
    ) -> list[AnswerChunk]:
        """As :meth:`answers`, for requests of one answer each that do not stream: the one chunk of
        each."""
        return [chunk for (chunk,) in await self.answers(requests, max_concurrency)]

    def abort(self, request_id: str, tenant: Tenant = NO_TENANT) -> None:
        """Drop a tenant's request. Its reader gets the text so far, with finish reason "abort". An
        unknown id is ignored."""
        if (opened := self._open.find(request_id, tenant)) is not None:
            self._abort(opened)

    def _abort(self, opened: OpenRequest) -> None:
        opened.is_aborted = True
        if opened.wire_id:
            self._outbox.send(AbortRequest(opened.wire_id))
        else:
            opened.abort()

    async def call(self, call: Call[Reply]) -> Reply:
        """Send a call of :mod:`radixrt.messages.calls` and wait for its reply.

        Raises:
            RequestError: the reply is an error.
            EngineDiedError: the engine ended.
        """
        if self._unloaded:
            raise RequestError(self._unloaded, status=503, retry_after_s=RETRY_AFTER_S)
        reply: Reply = await self._handlers.get(type(call), self._calls.ask)(call)
        return reply

    async def _load_adapter(self, call: LoadAdapterCall) -> AdapterInfo:
        async with self._adapter_calls:
            before = self.adapters.get(call.name)
            try:
                info = await self._calls.ask(call)
            except RequestError:
                await self._take_back(call, before)
                raise
            self.adapters[info.name] = info
            self.lost_adapters.discard(info.name)
            return info

    async def _take_back(self, call: LoadAdapterCall, before: AdapterInfo | None) -> None:
        """An adapter was not loaded by all replicas: give its name to what it had before, or, if
        those bytes are not there any more, to none."""
        if before is not None and not call.replaces:
            return
        with contextlib.suppress(RequestError):
            if before is not None:
                again = msgspec.structs.replace(call, path=before.path)
                if (await self._calls.ask(again)).digest == before.digest:
                    return
                self.adapters.pop(call.name, None)
            await self._calls.ask(UnloadAdapterCall(name=call.name))

    async def _unload_adapter(self, call: UnloadAdapterCall) -> AdapterInfo:
        async with self._adapter_calls:
            self.lost_adapters.discard(call.name)
            info = await self._calls.ask(call)
            self.adapters.pop(info.name, None)
            return info

    async def _stats(self, call: StatsCall) -> SchedulerStats:
        stats = await self._calls.ask(call)
        malformed_frames = stats.malformed_frames + self._inbox.malformed_frames
        return msgspec.structs.replace(stats, malformed_frames=malformed_frames)

    def start_replica(self, replica: int) -> None:
        """Let the supervisor start a drained replica; one that runs is left alone."""
        self._supervisor.tell(StartReplica(replica, self._supervisor.model))

    def engine_died(self, reason: str) -> None:
        """Fail all requests and calls, those in flight and those to come."""
        self._died = EngineDiedError(reason)
        if not self._info.done():
            self._info.set_exception(self._died)
        self._open.fail(self._died)
        self._calls.fail(self._died)

    @property
    def is_ready(self) -> bool:
        """An engine takes requests, and none of its processes hangs."""
        lives = self._info.done() and self._died is None and self._engine_is_alive
        return lives and self._supervisor.status.is_well

    @property
    def _engine_is_alive(self) -> bool:
        """No status has reported the death of the client's engine."""
        return self._supervisor.status.engine <= self._channels.engine

    async def drain(self, grace_s: float, reason: str) -> None:
        """Wait until no request is open. Those that are after ``grace_s`` end with an error that
        says the reason."""
        deadline = time.monotonic() + grace_s
        while len(self._open) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_LOOK_S)
        end = RequestError(reason, status=503, retry_after_s=RETRY_AFTER_S)
        self._open.fail(end)
        self._calls.fail(end)

    def close(self) -> None:
        self._receiving.cancel()
        self._leases.close()
        self._inbox.close()
        self._outbox.close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._died is not None:
            raise self._died
        try:
            self._outbox.send(message)
        except (TypeError, OverflowError, RecursionError) as error:
            raise RequestError(f"The request holds what can't be sent: {error}.") from error
        except FrameTooLargeError as error:
            raise RequestError(str(error), status=413) from error
        except UnicodeEncodeError as error:
            raise RequestError(
                "The text holds a lone surrogate (half of a UTF-16 pair), which is not a character; "
                "send valid Unicode."
            ) from error

    async def _receive(self) -> None:
        while True:
            self._dispatch(await self._inbox.receive())
            await asyncio.sleep(
                0
            )  # a message that has arrived is received without a pause for others

    def _dispatch(self, message: ToApi) -> None:
        """Hand a message to the request or call that waits for it; a message for none is
        dropped."""
        match message:
            case AnswerBatch():
                for chunk in message.chunks:
                    opened = self._open.on_wire(chunk.request_id)
                    if opened is not None and not opened.take(chunk):
                        self._outbox.send(AbortRequest(chunk.request_id))
            case RequestFailed():
                if (opened := self._open.on_wire(message.request_id)) is not None:
                    opened.fail(message.as_error())
            case CallReply():
                self._calls.take(message)
            case RequestsLost():
                self._open.take_over(message.request_ids, by_death=not message.has_drained)
                self._leases.restore(message.leases)
            case EngineInfo():
                before, self.adapters = self.adapters, {one.name: one for one in message.adapters}
                self.lost_adapters = (self.lost_adapters | before.keys()) - self.adapters.keys()
                if message.engine != self._channels.engine:
                    self._take_over(message)
                if not self._info.done() and self._engine_is_alive:
                    self._unloaded = ""
                    self._info.set_result(message)

    def _take_over(self, info: EngineInfo) -> None:
        """An engine has died, and another is ready: hand it all that is open."""
        if not self._unloaded:
            log.warning("Engine %d goes on with %d requests.", info.engine, len(self._open))
        self._outbox.close()
        self._channels = Channels(self._channels.run_dir, info.engine)
        self._outbox = Outbox(self._channels.address("api", "tokenizer"))
        self._calls.take_over()
        self._open.take_over()
        self._leases.restore()
