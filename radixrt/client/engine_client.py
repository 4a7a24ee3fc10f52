"""Asynchronous client of a running engine. The api process and the offline ``LLM`` both use it."""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.base.ipc import AsyncInbox, Channels, FrameTooLargeError, Outbox
from radixrt.constrained.spec import Spec
from radixrt.messages.answers import AnswerBatch, AnswerChunk, EngineInfo, RequestFailed
from radixrt.messages.calls import (
    CacheTreeCall,
    CompileCall,
    DetokenizeCall,
    FlushCacheCall,
    PinCall,
    ReleaseCacheCall,
    StatsCall,
    TokenizeCall,
)
from radixrt.messages.ids import pack_ids
from radixrt.messages.links import ToApi
from radixrt.messages.replies import (
    CacheFlushed,
    CacheReleased,
    CallReply,
    CompileReport,
    Detokenized,
    LeaseGranted,
    Tokenized,
)
from radixrt.messages.requests import AbortRequest, GenerateRequest, Prompt
from radixrt.messages.stats import SchedulerStats

log = logging.getLogger(__name__)


Value = TypeVar("Value")

Arrival = AnswerChunk | RequestError | EngineDiedError

RunRequests = Callable[[list[GenerateRequest]], Awaitable[list[AnswerChunk]]]
"""Runs requests of one answer each, which do not stream, side by side; returns the one chunk of each."""


class _Mailbox:
    """Queue of the chunks of one request that are not read yet."""

    def __init__(self, capacity: float) -> None:
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self._capacity = capacity
        self._overrun = False

    def put(self, arrival: Arrival) -> bool:
        """False: the queue is full. Its reader finds an error at its end; nothing more is taken."""
        if not self._overrun:
            self._overrun = self._queue.qsize() >= self._capacity
            self._queue.put_nowait(_too_slow() if self._overrun else arrival)
        return not self._overrun

    async def get(self) -> Arrival:
        return await self._queue.get()


class EngineClient:
    """One end of the link to the tokenizer process. Make it inside a running event loop, and use it only there.

    Example::

        client = EngineClient(channels)  # of radixrt.base.ipc
        await client.ready()
        prompt = TextPrompt("Once upon a time")
        async for chunk in client.generate(GenerateRequest(request_id="1", prompt=prompt, stream=True)):
            print(chunk.text, end="")
    """

    def __init__(self, channels: Channels, most_unread: float = math.inf) -> None:
        """
        Args:
            most_unread: most chunks of an answer that wait for a slow reader; beyond it the request is aborted.
        """
        self._inbox: AsyncInbox[ToApi] = AsyncInbox(channels.address("tokenizer", "api"), ToApi)
        self._outbox = Outbox(channels.address("api", "tokenizer"))
        self._most_unread = most_unread
        loop = asyncio.get_running_loop()
        self._info: asyncio.Future[EngineInfo] = loop.create_future()
        self._arrivals: dict[str, _Mailbox] = {}
        """Chunks of each request in flight, by its id on the wire."""
        self._wire_ids: dict[str, str] = {}
        """By request id. The wire's are never used twice, so that late chunks of a request that was dropped
        can't be taken for those of a new one of the same name."""
        self._new_number = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._died: EngineDiedError | None = None
        self._receiving = loop.create_task(self._receive())

    async def ready(self) -> EngineInfo:
        """Wait until the engine can take requests."""
        return await asyncio.shield(self._info)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the chunks of all ``n`` answers until each is complete.

        Closing the iterator, or cancelling the task in it, aborts the request.

        Raises:
            RequestError: the request was refused, or was lost, or its reader is too slow.
            EngineDiedError: the engine ended.
        """
        if request.request_id in self._wire_ids:
            raise id_in_use(request.request_id)
        wire_id = f"{request.request_id}#{next(self._new_number)}"
        arrivals = _Mailbox(self._most_unread * request.sampling.n)
        self._wire_ids[request.request_id] = wire_id
        self._arrivals[wire_id] = arrivals
        unfinished = request.sampling.n
        try:
            self._send(msgspec.structs.replace(request, request_id=wire_id))
            while unfinished:
                arrival = await arrivals.get()
                if isinstance(arrival, AnswerChunk):
                    unfinished -= arrival.finish_reason is not None
                    yield arrival
                else:
                    unfinished = 0
                    raise arrival
        finally:
            if unfinished:
                self.abort(request.request_id)
            del self._arrivals[wire_id], self._wire_ids[request.request_id]

    async def answers(
        self,
        requests: Sequence[GenerateRequest],
        at_once: int = 1 << 31,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[list[AnswerChunk]]:
        """Run requests; returns the chunks of each. The first that fails aborts all of them.

        Args:
            at_once: most requests in flight; the others wait here.
            on_answer: called whenever a request is complete.

        Raises:
            RequestError: a request was refused, or was lost.
            EngineDiedError: the engine ended.
        """
        limit = asyncio.Semaphore(at_once)

        async def answer(request: GenerateRequest) -> list[AnswerChunk]:
            async with limit:
                chunks = [chunk async for chunk in self.generate(request)]
            on_answer()
            return chunks

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(request)) for request in requests]
        except* (RequestError, EngineDiedError) as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def run(self, requests: list[GenerateRequest]) -> list[AnswerChunk]:
        """As :meth:`answers`, for requests of one answer each that do not stream: the one chunk of each."""
        return [chunk for (chunk,) in await self.answers(requests)]

    def abort(self, request_id: str) -> None:
        """Drop a request. Its reader gets the text so far, with finish reason "abort". An unknown id is ignored."""
        if wire_id := self._wire_ids.get(request_id):
            self._outbox.send(AbortRequest(wire_id))

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        """A prompt, also one some times longer than the context, as token ids and as text."""
        return await self._call(TokenizeCall, Tokenized, prompt=prompt)

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        value = await self._call(
            DetokenizeCall,
            Detokenized,
            token_ids=pack_ids(token_ids),
            skip_special_tokens=skip_special_tokens,
        )
        return value.text

    async def compile(self, structured: Spec) -> CompileReport:
        """Compile a constraint ahead of the requests that will use it.

        Raises:
            RequestError: it can't be enforced.
        """
        return await self._call(CompileCall, CompileReport, structured=structured)

    async def flush_cache(self) -> int:
        """Empty the radix tree of all KV that no running request uses; returns the number of pages freed."""
        return (await self._call(FlushCacheCall, CacheFlushed)).pages_freed

    async def pin(self, prompt: Prompt, cache_salt: str, ttl_s: float) -> LeaseGranted:
        """Keep the KV that the radix tree holds of a prompt from eviction, for ``ttl_s`` seconds.

        A caller that is cancelled meanwhile leaves no lease behind.

        Raises:
            RequestError: too much is pinned already, or ``ttl_s`` is too long.
        """
        pinning = asyncio.ensure_future(
            self._call(PinCall, LeaseGranted, prompt=prompt, cache_salt=cache_salt, ttl_s=ttl_s)
        )
        try:
            return await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(self._give_back)
            raise

    async def release_cache(
        self, *, lease: str = "", session: str = "", cache_salt: str = ""
    ) -> int:
        """End a lease, or a session, whose KV is then evicted first; returns the number of tokens of either.

        Raises:
            RequestError: the lease is unknown, or has ended.
        """
        value = await self._call(
            ReleaseCacheCall, CacheReleased, lease=lease, session=session, cache_salt=cache_salt
        )
        return value.released_tokens

    async def cache_tree(self, depth: int, children: int) -> dict[str, Any]:
        """A view of the radix tree: a :class:`radixrt.messages.cache_tree.CacheTree` as builtins, with texts of tokens.

        Args:
            depth: levels of nodes below each root.
            children: most of them shown of each node.
        """
        return await self._call(CacheTreeCall, dict, depth=depth, children=children)

    def _give_back(self, pinning: asyncio.Future[LeaseGranted]) -> None:
        """Release a lease whose caller was cancelled."""
        if not pinning.cancelled() and pinning.exception() is None and self._died is None:
            lease = pinning.result().lease
            call_id = next(self._new_number)  # nobody waits for the reply
            self._outbox.send(ReleaseCacheCall(call_id=call_id, lease=lease))

    async def stats(self, check_invariants: bool = False) -> SchedulerStats:
        """Raises:
        RequestError: an invariant is broken (only with ``check_invariants``).
        """
        stats = await self._call(StatsCall, SchedulerStats, check_invariants=check_invariants)
        malformed_frames = stats.malformed_frames + self._inbox.malformed_frames
        return msgspec.structs.replace(stats, malformed_frames=malformed_frames)

    def engine_died(self, reason: str) -> None:
        """Fail all requests and calls, those in flight and those to come."""
        self._died = EngineDiedError(reason)
        if not self._info.done():
            self._info.set_exception(self._died)
        for arrivals in self._arrivals.values():
            arrivals.put(self._died)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(self._died)

    def close(self) -> None:
        self._receiving.cancel()
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

    async def _call(
        self, kind: Callable[..., msgspec.Struct], value_type: type[Value], **fields: Any
    ) -> Value:
        """Send a call and wait for the value of its reply.

        Raises:
            RequestError: the reply is an error.
        """
        call_id = next(self._new_number)
        reply = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(kind(call_id=call_id, **fields))
            return msgspec.convert(await reply, value_type)
        finally:
            del self._calls[call_id]

    async def _receive(self) -> None:
        while True:
            self._dispatch(await self._inbox.receive())

    def _dispatch(self, message: ToApi) -> None:
        """Hand a message to the request or call that waits for it; a message for none is dropped."""
        match message:
            case AnswerBatch():
                for chunk in message.chunks:
                    arrivals = self._arrivals.get(chunk.request_id)
                    if arrivals is not None and not arrivals.put(chunk):
                        self._outbox.send(AbortRequest(chunk.request_id))
            case RequestFailed():
                if (arrivals := self._arrivals.get(message.request_id)) is not None:
                    arrivals.put(message.as_error())
            case CallReply():
                reply = self._calls.get(message.call_id)
                if reply is None or reply.done():
                    return
                if message.error is not None:
                    reply.set_exception(message.error.as_error())
                else:
                    reply.set_result(message.value)
            case EngineInfo():
                if not self._info.done():
                    self._info.set_result(message)


def _too_slow() -> RequestError:
    return RequestError(
        "The answer was dropped, since too much of it waits to be read.", status=408
    )


def id_in_use(request_id: str) -> RequestError:
    return RequestError(
        f"A request with id {request_id!r} is under way; choose another id.", param="rid"
    )
