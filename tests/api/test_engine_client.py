"""The client at the death of an engine: calls and leases. The tests play the engines."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from radixrt.base.channels import Channels
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.base.ipc import AsyncInbox, Outbox
from radixrt.base.liveness.link import ServerStatus, SupervisorLink
from radixrt.base.sampling_params import SamplingParams
from radixrt.client import leases
from radixrt.client.engine_client import EngineClient
from radixrt.client.leases import ClientLeases
from radixrt.client.warming import pin
from radixrt.messages.answers import AnswerBatch, AnswerChunk, AnswerReport, RequestFailed
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.calls import (
    CallReply,
    FlushCacheCall,
    LeaseGranted,
    PinCall,
    ReleaseCacheCall,
    TokenizeCall,
    Tokenized,
)
from radixrt.messages.ids import pack_ids
from radixrt.messages.links import ToTokenizerFromApi
from radixrt.messages.requests import (
    NO_TENANT,
    AbortRequest,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
)
from tests.servers.fake_scheduler import engine_info

PROMPT = TextPrompt("to pin")


def a_request(prompt: Prompt) -> GenerateRequest:
    options = RequestOptions(sampling=SamplingParams(temperature=0.0))
    return GenerateRequest(request_id="r", prompt=prompt, stream=True, options=options)


class Engines:
    """A client, and the tokenizer process of each engine."""

    def __init__(self) -> None:
        self.channels = Channels(Channels.make_run_dir())
        self.supervisor = SupervisorLink()
        self.client = EngineClient(self.channels_of_client(), supervisor=self.supervisor)
        self._to_client = Outbox(self.channels.address("tokenizer", "api"))
        self._bind()

    def channels_of_client(self) -> Channels:
        return Channels(self.channels.run_dir)

    def _bind(self) -> None:
        self.inbox: AsyncInbox[ToTokenizerFromApi] = AsyncInbox(
            self.channels.address("api", "tokenizer"), ToTokenizerFromApi
        )

    def reply(self, message: Any) -> None:
        self._to_client.send(message)

    async def next(self, kind: type) -> Any:
        message = await asyncio.wait_for(self.inbox.receive(), 5)
        assert isinstance(message, kind), message
        return message

    async def is_silent(self) -> bool:
        try:
            await asyncio.wait_for(self.inbox.receive(), 0.05)
        except TimeoutError:
            return True
        return False

    async def start(self) -> None:
        self.reply(msgspec.structs.replace(engine_info(), engine=self.channels.engine))
        await self.client.ready()

    def die(self) -> None:
        self.inbox.close()
        self.channels.next_engine()
        self.supervisor.take(ServerStatus(engine=self.channels.engine))
        self._bind()

    async def restart(self) -> None:
        self.reply(msgspec.structs.replace(engine_info(), engine=self.channels.engine))
        while self.client.engine != self.channels.engine:
            await asyncio.sleep(0.001)

    async def compute(self) -> None:
        """Answer the request that computes a prompt."""
        request = await self.next(GenerateRequest)
        assert request.sampling.max_tokens == 0
        report = AnswerReport(prompt_tokens=3, finish_reason="length")
        self.reply(
            AnswerBatch([AnswerChunk(request_id=request.request_id, index=0, text="", token_ids=b"", report=report)])
        )  # fmt: skip

    async def grant(self, lease: str) -> PinCall:
        call = await self.next(PinCall)
        value = LeaseGranted(lease=call.lease or lease, pinned_tokens=3, expires_in_s=call.ttl_s)
        self.reply(CallReply(call_id=call.call_id, value=value))
        return call

    async def pin(self, lease: str, ttl_s: float = 60.0) -> None:
        pinning = asyncio.create_task(
            self.client.call(PinCall(prompt=PROMPT, root=CacheRoot(salt="salt"), ttl_s=ttl_s))
        )
        await self.grant(lease)
        assert (await pinning).lease == lease

    def close(self) -> None:
        self.client.close()
        self.inbox.close()
        self._to_client.close()
        shutil.rmtree(self.channels.run_dir)


def with_engines(test: Callable[[Engines], Awaitable[None]]) -> Callable[[], None]:
    async def run() -> None:
        engines = Engines()
        await engines.start()
        try:
            await test(engines)
        finally:
            engines.close()

    def wrapped() -> None:
        asyncio.run(run())

    wrapped.__name__ = test.__name__
    return wrapped


def test_the_first_engine_may_die_before_it_is_ready() -> None:
    async def scene() -> None:
        engines = Engines()
        try:
            engines.die()
            await engines.start()
            asking = asyncio.create_task(engines.client.call(FlushCacheCall()))
            call = await engines.next(FlushCacheCall)
            engines.reply(CallReply(call_id=call.call_id, value=3))
            assert await asking == 3
        finally:
            engines.close()

    asyncio.run(scene())


@with_engines
async def test_a_call_is_asked_again(engines: Engines) -> None:
    asking = asyncio.create_task(engines.client.call(TokenizeCall(PROMPT, NO_TENANT, BASE_ROOT)))
    await engines.next(TokenizeCall)
    engines.die()
    await engines.restart()
    call = await engines.next(TokenizeCall)
    assert call.prompt == PROMPT
    engines.reply(CallReply(call_id=call.call_id, value=Tokenized(token_ids=[1], prompt="x")))
    assert (await asking).token_ids == [1]


@with_engines
async def test_a_call_that_comes_while_no_engine_lives_waits_for_one(engines: Engines) -> None:
    engines.die()
    asking = asyncio.create_task(engines.client.call(FlushCacheCall()))
    assert await engines.is_silent()
    await engines.restart()
    call = await engines.next(FlushCacheCall)
    engines.reply(CallReply(call_id=call.call_id, value=3))
    assert await asking == 3


@with_engines
async def test_a_call_that_was_asked_at_two_deaths_fails(engines: Engines) -> None:
    """It may be their cause."""
    asking = asyncio.create_task(engines.client.call(TokenizeCall(PROMPT, NO_TENANT, BASE_ROOT)))
    for _ in range(2):
        await engines.next(TokenizeCall)
        engines.die()
        await engines.restart()
    with pytest.raises(RequestError, match="restarted") as failed:
        await asking
    assert failed.value.status == 503 and failed.value.retry_after_s
    assert await engines.is_silent()


@with_engines
async def test_what_cannot_be_sent_to_the_next_engine_fails_alone(engines: Engines) -> None:
    """The client receives on, and others are answered."""
    engines.die()
    chat = ChatPrompt(messages=[], template_kwargs={"x": 10**30})
    hopeless = [
        asyncio.create_task(engines.client.call(TokenizeCall(chat, NO_TENANT, BASE_ROOT))),
        asyncio.create_task(
            engines.client.call(TokenizeCall(TextPrompt("a\ud800b"), NO_TENANT, BASE_ROOT))
        ),
        asyncio.create_task(anext(engines.client.generate(a_request(chat)))),  # type: ignore[arg-type]
    ]
    asking = asyncio.create_task(engines.client.call(FlushCacheCall()))
    assert await engines.is_silent()
    await engines.restart()
    for task in hopeless:
        with pytest.raises(RequestError, match=r"can't be sent|lone surrogate") as failed:
            await asyncio.wait_for(task, 5)
        assert failed.value.status == 400
    call = await engines.next(FlushCacheCall)
    engines.reply(CallReply(call_id=call.call_id, value=3))
    assert await asyncio.wait_for(asking, 5) == 3


@pytest.mark.parametrize("is_api", [True, False])
def test_a_client_that_can_receive_no_more_says_so(is_api: bool) -> None:
    """The api process ends then; a program with an engine gets the error for all that it asks."""
    failures: list[str] = []

    async def scene() -> None:
        channels = Channels(Channels.make_run_dir())
        client = EngineClient(channels, on_failure=failures.append if is_api else None)
        client._dispatch = lambda message: {}[message]  # type: ignore[method-assign]
        getting_ready = asyncio.create_task(client.ready())
        to_client = Outbox(channels.address("tokenizer", "api"))
        to_client.send(engine_info())
        try:
            await asyncio.wait([getting_ready, client._receiving], return_when="FIRST_COMPLETED")
            await asyncio.sleep(0)
            assert bool(failures) == is_api
            if not is_api:
                with pytest.raises(EngineDiedError, match="receiving of the engine's messages"):
                    await asyncio.wait_for(client.call(FlushCacheCall()), 5)
        finally:
            getting_ready.cancel()
            client.close()
            to_client.close()
            shutil.rmtree(channels.run_dir)

    asyncio.run(scene())


@with_engines
async def test_an_abort_while_an_answer_is_taken_over_ends_it_where_it_is(engines: Engines) -> None:
    answer = engines.client.generate(a_request(PROMPT))
    reading = asyncio.create_task(anext(answer))  # type: ignore[arg-type]
    request = await engines.next(GenerateRequest)
    begun = AnswerChunk(request_id=request.request_id, index=0, text="a", token_ids=pack_ids([5]))
    engines.reply(AnswerBatch([begun]))
    assert (await reading).text == "a"
    engines.die()
    await engines.restart()
    again = await engines.next(GenerateRequest)
    engines.client.abort("r")
    await engines.next(AbortRequest)  # while the prompt is encoded
    error = RequestError("The request was aborted before it began.", code="request_aborted")
    engines.reply(RequestFailed.from_error(error, again.request_id))
    assert [chunk.finish_reason async for chunk in answer] == ["abort"]


@with_engines
async def test_leases_are_taken_again_under_their_ids(engines: Engines) -> None:
    await engines.pin("lease-1", ttl_s=60)
    engines.die()
    await engines.restart()
    await engines.compute()
    call = await engines.grant("another")
    assert (call.lease, call.prompt, call.root) == ("lease-1", PROMPT, CacheRoot(salt="salt"))
    assert 50 < call.ttl_s < 60
    releasing = asyncio.create_task(engines.client.call(ReleaseCacheCall(lease="lease-1")))
    release = await engines.next(ReleaseCacheCall)
    engines.reply(CallReply(call_id=release.call_id, value=3))
    assert await releasing == 3
    engines.die()
    await engines.restart()
    assert await engines.is_silent()  # it was released


@with_engines
async def test_a_release_waits_for_its_lease(engines: Engines) -> None:
    await engines.pin("lease-1")
    engines.die()
    await engines.restart()
    releasing = asyncio.create_task(engines.client.call(ReleaseCacheCall(lease="lease-1")))
    await engines.compute()
    await engines.grant("another")
    release = await engines.next(ReleaseCacheCall)
    engines.reply(CallReply(call_id=release.call_id, value=3))
    assert await releasing == 3


@with_engines
async def test_a_lease_that_cannot_be_taken_again_is_reported_lost(engines: Engines) -> None:
    await engines.pin("lease-1")
    engines.die()
    await engines.restart()
    await engines.compute()
    call = await engines.next(PinCall)
    failed = RequestFailed(message="Too much is pinned.", status=429)
    engines.reply(CallReply(call_id=call.call_id, error=failed))
    with pytest.raises(RequestError, match="lost when the engine was restarted: Too much") as lost:
        await engines.client.call(ReleaseCacheCall(lease="lease-1"))
    assert (lost.value.status, lost.value.code) == (404, "lease_lost")


@with_engines
async def test_leases_survive_a_death_while_they_are_taken_again(engines: Engines) -> None:
    await engines.pin("lease-1")
    await engines.pin("lease-2")
    engines.die()
    await engines.restart()
    await engines.compute()
    await engines.next(PinCall)
    engines.die()
    await engines.restart()
    for lease in ("lease-1", "lease-2"):
        await engines.compute()
        assert (await engines.grant("another")).lease == lease


@with_engines
async def test_a_prompt_that_a_dead_engine_has_computed_is_computed_again_to_be_pinned(
    engines: Engines,
) -> None:
    pinning = asyncio.create_task(
        pin(engines.client, engines.client.run, "pin", PROMPT, RequestOptions(), ttl_s=60)
    )
    await engines.compute()
    await engines.next(PinCall)
    engines.die()
    await engines.restart()
    await engines.compute()
    await engines.grant("lease-1")
    assert (await pinning).lease == "lease-1"


def never(*_: Any) -> Any:
    raise AssertionError


def test_kept_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []

    async def compute(request: GenerateRequest) -> None:
        asked.append(request.prompt)

    async def repin(call: PinCall) -> None: ...

    async def run() -> None:
        monkeypatch.setattr(leases, "MAX_PROMPT_BYTES", 1000)
        held = ClientLeases(compute, repin, never, lambda: now[0])
        small, large = (TokenPrompt(pack_ids(range(n))) for n in (5, 220))
        held.add("short", PinCall(prompt=large, root=BASE_ROOT, ttl_s=1.0))
        now[0] = 2.0
        held.add("first", PinCall(prompt=large, root=BASE_ROOT, ttl_s=60))  # "short" has expired
        held.add("too much", PinCall(prompt=large, root=BASE_ROOT, ttl_s=60))
        held.add("small", PinCall(prompt=small, root=BASE_ROOT, ttl_s=60))
        held.restore()
        with pytest.raises(RequestError, match="too large to be kept"):
            await held.before_release("too much")
        await held.before_release("small")
        assert asked == [large, small]

    asyncio.run(run())


def test_leases_that_have_expired_are_forgotten() -> None:
    now = [0.0]

    held = ClientLeases(never, never, never, lambda: now[0])
    for number in range(1000):
        now[0] += 1.0
        held.add(str(number), PinCall(prompt=TokenPrompt(b""), root=BASE_ROOT, ttl_s=10.0))
    assert len(held) < 100
