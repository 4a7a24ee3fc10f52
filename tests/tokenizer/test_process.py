"""The tokenizer process between an api and a scheduler that the test plays itself."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from radixrt.config import ServerConfig
from radixrt.engine_client import EngineClient
from radixrt.errors import EngineDiedError, RequestError
from radixrt.ipc import AsyncInbox, Channels, Outbox
from radixrt.messages import (
    AnswerChunk,
    GenerateRequest,
    ReleaseSequences,
    SequenceFinished,
    SequenceRequest,
    SequenceStarted,
    TextPrompt,
    TokenBatch,
    TokenPrompt,
    ToScheduler,
    pack_ids,
    unpack_ids,
)
from radixrt.sampling_params import SamplingParams
from radixrt.tokenizer.process import TokenizerProcess
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.fake_scheduler import engine_info
from tests.tiny_tokenizers import save_byte_level


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary.load(
        ServerConfig(model_path=str(save_byte_level(tmp_path_factory.mktemp("model"))))
    )


class Stage:
    """A tokenizer process, a client before it and the scheduler's two channels behind it."""

    def __init__(self, channels: Channels, vocabulary: Vocabulary) -> None:
        self.channels = channels
        self.vocabulary = vocabulary
        self.process = TokenizerProcess(ServerConfig(), channels, vocabulary)
        self.client = EngineClient(channels)
        self.at_scheduler: AsyncInbox[ToScheduler] = AsyncInbox(
            channels.address("tokenizer", "scheduler"), ToScheduler
        )
        self.from_scheduler = Outbox(channels.address("scheduler", "tokenizer"))

    async def sequence(self) -> SequenceRequest:
        message = await asyncio.wait_for(self.at_scheduler.receive(), 5)
        assert isinstance(message, SequenceRequest)
        return message

    async def released(self) -> list[int]:
        message = await asyncio.wait_for(self.at_scheduler.receive(), 5)
        assert isinstance(message, ReleaseSequences)
        return unpack_ids(message.seq_ids).tolist()

    def tokens(self, seq_id: int, ids: list[int], end: SequenceFinished | None = None) -> None:
        self.from_scheduler.send(
            TokenBatch(
                seq_ids=pack_ids([seq_id] * len(ids)),
                token_ids=pack_ids(ids),
                started=[SequenceStarted(seq_id, 0, 0.0, 0.0)],
                finished=[] if end is None else [end],
            )
        )

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text, add_special_tokens=False)


@asynccontextmanager
async def staged(vocabulary: Vocabulary) -> AsyncIterator[Stage]:
    channels = Channels(Channels.make_run_dir())
    stage = Stage(channels, vocabulary)
    running = asyncio.create_task(stage.process.run())
    stage.from_scheduler.send(engine_info())
    await asyncio.wait_for(stage.client.ready(), 5)
    try:
        yield stage
    finally:
        running.cancel()
        stage.client.close()
        stage.process.close()
        stage.at_scheduler.close()
        stage.from_scheduler.close()
        shutil.rmtree(channels.run_dir)


def play(vocabulary: Vocabulary, scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with staged(vocabulary) as stage:
            await asyncio.wait_for(scene(stage), 20)

    asyncio.run(main())


def request(text: str = "hi", stream: bool = True, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt=TextPrompt(text),
        sampling=SamplingParams(**sampling),
        stream=stream,
    )


async def collect(stage: Stage, generate: GenerateRequest) -> list[AnswerChunk]:
    return [chunk async for chunk in stage.client.generate(generate)]


def test_tokens_after_a_stop_string_in_one_step_are_dropped(vocabulary: Vocabulary) -> None:
    """A speculating engine brings several tokens of a sequence in one step."""

    async def scene(stage: Stage) -> None:
        answering = asyncio.create_task(collect(stage, request(stop=("END",), logprobs=None)))
        sequence = await stage.sequence()
        before, after = stage.encode("ab END"), stage.encode(" and more")
        stage.tokens(sequence.seq_id, [*before, *after])
        assert await stage.released() == [sequence.seq_id]
        stage.tokens(sequence.seq_id, after)  # what was under way: nobody's any more
        (chunk,) = await answering
        assert (chunk.text, chunk.stop_reason) == ("ab ", "END")
        assert unpack_ids(chunk.token_ids).tolist() == before
        assert chunk.times is not None and chunk.num_output_tokens == len(before)

    play(vocabulary, scene)


def test_a_stop_string_counts_only_after_min_tokens(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        ids = stage.encode("xx.yy.zz.")
        limit = len(stage.encode("xx.")) + 1
        answering = asyncio.create_task(collect(stage, request(stop=(".",), min_tokens=limit)))
        sequence = await stage.sequence()
        for token_id in ids:
            stage.tokens(sequence.seq_id, [token_id])
        assert "".join([c.text for c in await answering]) == "xx.yy"

    play(vocabulary, scene)


def test_text_that_might_become_a_stop_string_comes_out_at_the_end(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        answering = asyncio.create_task(collect(stage, request(stop=("###",))))
        sequence = await stage.sequence()
        ids = stage.encode("a##")
        stage.tokens(sequence.seq_id, ids, SequenceFinished(sequence.seq_id, "length", None, 0.1))
        (chunk,) = await answering
        assert (chunk.text, chunk.finish_reason) == ("a##", "length")

    play(vocabulary, scene)


def test_a_long_prompt_is_encoded_while_streams_go_on(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    held = threading.Event()
    encode = vocabulary.encode

    def slow_encode(text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > 20_000:
            assert held.wait(10)
            return encode(text[:100], add_special_tokens)
        return encode(text, add_special_tokens)

    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(vocabulary, "encode", slow_encode)
        monkeypatch.setattr(vocabulary, "longest_token", 1000)
        long = request("the " * 6000)
        slow = asyncio.create_task(collect(stage, long))
        quick_request = GenerateRequest(
            request_id="q", prompt=TokenPrompt(pack_ids([5])), sampling=SamplingParams()
        )
        quick = asyncio.create_task(collect(stage, quick_request))
        sequence = await stage.sequence()
        assert unpack_ids(sequence.token_ids).tolist() == [5]
        stage.tokens(sequence.seq_id, [60], SequenceFinished(sequence.seq_id, "stop", None, 0.1))
        assert len(await quick) == 1
        stage.client.abort("r")  # still being encoded: it never reaches the scheduler
        with pytest.raises(RequestError, match="aborted"):
            await slow
        held.set()
        again = asyncio.create_task(collect(stage, request("short")))
        sequence = await stage.sequence()
        assert unpack_ids(sequence.token_ids).tolist() == encode("short", False)
        again.cancel()

    play(vocabulary, scene)


def test_a_cancelled_iteration_releases_the_sequence(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        answering = asyncio.create_task(collect(stage, request(n=2)))
        ids = [(await stage.sequence()).seq_id, (await stage.sequence()).seq_id]
        answering.cancel()
        assert await stage.released() == ids

    play(vocabulary, scene)


def test_garbage_on_a_channel_and_unknown_sequences_harm_nobody(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        for sender in ("api", "scheduler"):
            socket = zmq.Context.instance().socket(zmq.PUSH)
            socket.connect(stage.channels.address(sender, "tokenizer"))
            for frame in (b"", b"\x00garbage", b"\x80", b"\x91" * 5000, bytes(100_000)):
                socket.send(frame)
            socket.close(linger=1000)
        stage.tokens(12345, [5, 6, 7])
        answering = asyncio.create_task(collect(stage, request()))
        sequence = await stage.sequence()
        stage.tokens(sequence.seq_id, [60], SequenceFinished(sequence.seq_id, "stop", None, 0.1))
        assert len(await answering) == 1

    play(vocabulary, scene)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(vocabulary: Vocabulary, text: str) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(RequestError, match="surrogate"):
            await collect(stage, request(text))

    play(vocabulary, scene)


def test_when_the_engine_dies_all_who_wait_are_told(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        answering = asyncio.create_task(collect(stage, request()))
        calling = asyncio.create_task(stage.client.stats())
        await stage.sequence()
        stage.client.engine_died("The worker was killed.")
        for waiting in (answering, calling, asyncio.create_task(collect(stage, request()))):
            with pytest.raises(EngineDiedError, match="worker was killed"):
                await waiting

    play(vocabulary, scene)


def test_seeds_of_requests_without_one_come_from_the_servers_seed(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    seeds: list[int | None] = []

    async def scene(stage: Stage) -> None:
        for _ in range(2):
            answering = asyncio.create_task(collect(stage, request()))
            seeds.append((await stage.sequence()).sampling.seed)
            answering.cancel()
            await stage.released()

    play(vocabulary, scene)
    play(vocabulary, scene)
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]
