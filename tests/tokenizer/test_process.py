"""The tokenizer process between an api and a scheduler that the test plays itself."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.base.ipc import AsyncInbox, Outbox
from radixrt.base.liveness.heartbeat import Heartbeat
from radixrt.base.liveness.link import SupervisorLink
from radixrt.base.sampling_params import PREFILL_ONLY, SamplingParams
from radixrt.client.engine_client import EngineClient
from radixrt.constrained.constraint import AnyJson
from radixrt.messages.answers import AnswerChunk, AnswerReport, DraftCounts
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.calls import DetokenizeCall, StatsCall, TokenizeCall
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.links import ToScheduler
from radixrt.messages.requests import (
    NO_TENANT,
    GenerateRequest,
    PartialAnswer,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
)
from radixrt.messages.sequences import (
    ReleaseSequences,
    SequenceOutput,
    SequenceRequest,
    TokenBatch,
)
from radixrt.tokenizer import process
from radixrt.tokenizer.process import TokenizerProcess
from radixrt.tokenizer.prompt.kept_answers import ENTRY_BYTES
from radixrt.tokenizer.prompt.prompts import KEPT_BYTES_PER_TOKEN
from radixrt.tokenizer.request_encoder import RequestEncoder
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.fake_scheduler import engine_info


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary.load(
        ServerConfig(model_path=str(save_byte_level(tmp_path_factory.mktemp("model"))))
    )


class Stage:
    """A tokenizer process, a client before it and the scheduler's two channels behind it."""

    def __init__(self, channels: Channels, vocabulary: Vocabulary, config: ServerConfig) -> None:
        self.channels = channels
        self.vocabulary = vocabulary
        self.replica = channels.of_replica(0, 0)
        self.replica.folder.mkdir()
        self.process = TokenizerProcess(config, channels, vocabulary, SupervisorLink())
        self.client = EngineClient(channels)
        self.at_scheduler: AsyncInbox[ToScheduler] = AsyncInbox(
            self.replica.address("tokenizer", "scheduler"), ToScheduler
        )
        self.from_scheduler = Outbox(self.replica.address("scheduler", "tokenizer"))

    async def sequence(self) -> SequenceRequest:
        message = await asyncio.wait_for(self.at_scheduler.receive(), 5)
        assert isinstance(message, SequenceRequest)
        return message

    async def released(self) -> list[int]:
        message = await asyncio.wait_for(self.at_scheduler.receive(), 5)
        assert isinstance(message, ReleaseSequences)
        return unpack_ids(message.seq_ids).tolist()

    async def all_read(self) -> None:
        """Wait until the tokenizer has read all that the client sent."""
        asking = asyncio.create_task(self.client.call(StatsCall()))
        assert isinstance(await asyncio.wait_for(self.at_scheduler.receive(), 5), StatsCall)
        asking.cancel()

    def tokens(
        self,
        seq_id: int,
        ids: list[int],
        end: AnswerReport | None = None,
        drafts: DraftCounts | None = None,
    ) -> None:
        self.from_scheduler.send(
            TokenBatch(
                outputs={
                    seq_id: SequenceOutput(
                        ids, started=AnswerReport(prompt_tokens=2), finished=end, drafts=drafts
                    )
                }
            )
        )

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text, add_special_tokens=False)


@asynccontextmanager
async def staged(vocabulary: Vocabulary, **settings: Any) -> AsyncIterator[Stage]:
    channels = Channels(Channels.make_run_dir())
    stage = Stage(channels, vocabulary, ServerConfig(**settings))
    running = asyncio.create_task(stage.process.run())
    stage.from_scheduler.send(engine_info())
    await asyncio.wait_for(stage.client.ready(), 5)
    try:
        yield stage
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        stage.client.close()
        stage.process.close()
        stage.at_scheduler.close()
        stage.from_scheduler.close()
        shutil.rmtree(channels.run_dir)


def play(
    vocabulary: Vocabulary, scene: Callable[[Stage], Awaitable[None]], **settings: Any
) -> None:
    async def main() -> None:
        async with staged(vocabulary, **settings) as stage:
            await asyncio.wait_for(scene(stage), 20)

    asyncio.run(main())


def request(text: str = "hi", stream: bool = True, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt=TextPrompt(text),
        stream=stream,
        options=RequestOptions(sampling=SamplingParams(**sampling)),
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
        assert (chunk.text, chunk.report.stop_reason) == ("ab ", "END")
        assert unpack_ids(chunk.token_ids).tolist() == before
        assert chunk.report.times["total_s"] > 0 and chunk.report.output_tokens == len(before)

    play(vocabulary, scene)


def test_the_drafts_of_an_answer_that_ends_at_a_stop_string_are_counted(
    vocabulary: Vocabulary,
) -> None:
    """Of five drafts of the first step three are accepted; all six of the second are, but two lie
    behind the stop string."""

    async def scene(stage: Stage) -> None:
        answering = asyncio.create_task(collect(stage, request(stop=("END",))))
        sequence = await stage.sequence()
        ids = stage.encode("abcdEND")
        assert len(ids) == 7
        stage.tokens(sequence.seq_id, [*ids[:3], ids[0]], drafts={"ngram": (5, 3)})
        stage.tokens(sequence.seq_id, ids[1:3])
        stage.tokens(
            sequence.seq_id, [*ids[3:], *ids[:3]], drafts={"ngram": (9, 7), "head": (2, 2)}
        )
        report = (await answering)[-1].report
        assert report.output_tokens == 10
        assert report.accepted_prediction_tokens == 3 + 4
        assert report.rejected_prediction_tokens == 2 + 2
        assert report.drafts == {"ngram": (9, 7), "head": (2, 2)}

    play(vocabulary, scene)


def test_a_request_waits_for_the_encoding_of_one_idle_prompt(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_encode = threading.Event()
    encode = RequestEncoder.encode

    def slow(encoder: RequestEncoder, request: GenerateRequest) -> Any:
        assert may_encode.wait(5)
        return encode(encoder, request)

    monkeypatch.setattr(RequestEncoder, "encode", slow)

    async def scene(stage: Stage) -> None:
        idle = RequestOptions(sampling=PREFILL_ONLY, idle="expected")
        asked = [replace(request(), request_id=f"idle {n}", options=idle) for n in range(9)]
        asked.append(request(max_tokens=3))
        asking = [asyncio.create_task(collect(stage, one)) for one in asked]
        await asyncio.sleep(0)
        await stage.all_read()
        may_encode.set()
        kinds = [(await stage.sequence()).options.idle for _ in asked]
        assert kinds == ["expected"] * 2 + [""] + ["expected"] * 7
        for one in asking:
            one.cancel()

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
        stage.tokens(sequence.seq_id, ids, AnswerReport(finish_reason="length"))
        (chunk,) = await answering
        assert (chunk.text, chunk.finish_reason) == ("a##", "length")

    play(vocabulary, scene)


def test_a_long_prompt_is_encoded_while_streams_go_on(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    encode = vocabulary.encode

    def slow_encode(text: str, *options: Any) -> list[int]:
        if len(text) > 20_000:
            assert held.wait(10)
            return encode(text[:100], *options)
        return encode(text, *options)

    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(vocabulary, "encode", slow_encode)
        monkeypatch.setattr(vocabulary, "longest_token", 1000)
        long = request("the " * 6000)
        slow = asyncio.create_task(collect(stage, long))
        quick_request = GenerateRequest(
            request_id="q",
            prompt=TokenPrompt(pack_ids([5])),
            options=RequestOptions(sampling=SamplingParams()),
        )
        quick = asyncio.create_task(collect(stage, quick_request))
        sequence = await stage.sequence()
        assert unpack_ids(sequence.token_ids).tolist() == [5]
        stage.tokens(sequence.seq_id, [60], AnswerReport(finish_reason="stop"))
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


class HeldEncoder:
    """Encodes only while ``open`` is set, and remembers what it encoded."""

    def __init__(self, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.texts: list[str] = []
        self._encode = vocabulary.encode
        monkeypatch.setattr(vocabulary, "encode", self)

    def __call__(self, text: str, *options: Any) -> list[int]:
        self.texts.append(text)
        assert self.open.wait(10)
        return self._encode(text, *options)


def numbered(group: str, number: int, text: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{group}-{number}",
        group_id=group,
        prompt=TextPrompt(text),
        options=RequestOptions(sampling=SamplingParams()),
    )


def test_a_batch_of_prompts_takes_turns_with_other_requests(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = HeldEncoder(vocabulary, monkeypatch)

    async def scene(stage: Stage) -> None:
        batch = [numbered("batch", i, f"batch {i}") for i in range(50)]
        answering = [asyncio.create_task(collect(stage, one)) for one in batch]
        answering.append(asyncio.create_task(collect(stage, numbered("other", 0, "word"))))
        await stage.all_read()
        encoder.open.set()
        texts = [vocabulary.decode(unpack_ids((await stage.sequence()).token_ids)) for _ in batch]
        assert texts.index("word") <= 2
        for task in answering:
            task.cancel()

    play(vocabulary, scene)


def test_what_is_aborted_before_its_turn_is_never_encoded(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = HeldEncoder(vocabulary, monkeypatch)

    async def scene(stage: Stage) -> None:
        batch = [numbered("batch", i, f"batch {i}") for i in range(50)]
        answering = [asyncio.create_task(collect(stage, one)) for one in batch]
        await stage.all_read()
        for task in answering:
            task.cancel()
        await stage.all_read()
        encoder.open.set()
        other = asyncio.create_task(collect(stage, numbered("other", 0, "word")))
        assert vocabulary.decode(unpack_ids((await stage.sequence()).token_ids)) == "word"
        assert encoder.texts == ["batch 0", "word"]
        other.cancel()

    play(vocabulary, scene)


def test_a_text_that_does_not_come_to_an_end_stops_the_heartbeat(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor then kills the process, as it does when the event loop hangs."""
    monkeypatch.setattr(process, "LONGEST_WAIT_S", 0.02)
    encoder = HeldEncoder(vocabulary, monkeypatch)

    async def scene(stage: Stage) -> None:
        heartbeat = Heartbeat(stage.channels.heartbeat_file("tokenizer"))
        asking = asyncio.create_task(
            stage.client.call(TokenizeCall(TextPrompt("endless"), NO_TENANT, BASE_ROOT))
        )
        while not heartbeat.is_overdue():
            await asyncio.sleep(0.01)
        encoder.open.set()
        await asking
        while heartbeat.is_overdue():
            await asyncio.sleep(0.01)

    play(vocabulary, scene, step_timeout=0.5)


def test_a_token_is_counted_at_once(vocabulary: Vocabulary) -> None:
    """The supervisor ends the server after deaths of processes without a token between them."""

    async def scene(stage: Stage) -> None:
        heartbeat = Heartbeat(stage.channels.heartbeat_file("tokenizer"))
        answering = asyncio.create_task(collect(stage, request()))
        sequence = await stage.sequence()
        stage.tokens(sequence.seq_id, [60, 61], AnswerReport(finish_reason="stop"))
        await answering
        assert heartbeat.record.done == 2

    play(vocabulary, scene)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(
    vocabulary: Vocabulary, work: str
) -> None:
    """Else the tokens of running answers would wait for it. CPU times tell, on a busy machine too:
    a thread that always has work gets about as much as the library does, or next to nothing."""
    text = "the quick fox " * 50_000
    ids = vocabulary.encode(text, False) * 10
    long = {
        "encode": lambda: vocabulary.encode(text, False),
        "decode": lambda: vocabulary.decode(ids),
    }
    thread = threading.Thread(target=long[work])
    own, all_threads = time.thread_time(), time.process_time()
    thread.start()
    while thread.is_alive():
        pass
    own, all_threads = time.thread_time() - own, time.process_time() - all_threads
    assert own > (all_threads - own) / 8


def test_a_cancelled_iteration_releases_the_sequence(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        answering = asyncio.create_task(collect(stage, request(n=2)))
        ids = [(await stage.sequence()).seq_id, (await stage.sequence()).seq_id]
        answering.cancel()
        assert await stage.released() == ids

    play(vocabulary, scene)


def test_a_deadline_that_the_engine_does_not_keep_ends_only_its_own_answers(
    vocabulary: Vocabulary,
) -> None:
    async def scene(stage: Stage) -> None:
        hasty, patient = request(n=2), request()
        options = replace(hasty.options, deadline=time.time())
        hasty = replace(hasty, request_id="hasty", options=options)
        with stage.client.open([hasty, patient]) as answers:
            ends = [await anext(answers), await anext(answers)]
            assert [(number, chunk.finish_reason) for number, chunk in ends] == [(0, "abort")] * 2
            sequences = [await stage.sequence() for _ in range(3)]
            (going_on,) = [s.seq_id for s in sequences if s.options.deadline is None]
            stage.tokens(going_on, [60], AnswerReport(finish_reason="length"))
            number, chunk = await anext(answers)
            assert (number, chunk.finish_reason) == (1, "length")

    play(vocabulary, scene)


def test_a_reader_that_does_not_read_is_given_up(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        client = stage.client
        client._max_buffered = 50
        answer = client.generate(request())
        first = asyncio.create_task(anext(answer))
        sequence = await stage.sequence()
        for _ in range(60):
            stage.tokens(sequence.seq_id, [60])
        assert await stage.released() == [sequence.seq_id]
        await first
        with pytest.raises(RequestError, match="dropped"):
            async for _ in answer:
                pass

    play(vocabulary, scene)


def test_garbage_on_a_channel_and_unknown_sequences_harm_nobody(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        for channels, sender in ((stage.channels, "api"), (stage.replica, "scheduler")):
            socket = zmq.Context.instance().socket(zmq.PUSH)
            socket.connect(channels.address(sender, "tokenizer"))
            for frame in (b"", b"\x00garbage", b"\x80", b"\x91" * 5000, bytes(100_000)):
                socket.send(frame)
            socket.close(linger=1000)
        stage.tokens(12345, [5, 6, 7])
        answering = asyncio.create_task(collect(stage, request()))
        sequence = await stage.sequence()
        stage.tokens(sequence.seq_id, [60], AnswerReport(finish_reason="stop"))
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
        await stage.sequence()
        calling = asyncio.create_task(stage.client.call(StatsCall()))
        await asyncio.sleep(0)
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


def test_kept_answers_are_bounded_by_the_kv_pool(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        answers = stage.vocabulary.segments.answers
        texts = [f"{number:04}" for number in range(2000)]
        for text in texts:
            answers.keep(text, "!", [7], BASE_ROOT)
        found = [bool(answers.find(text + "!", [5], BASE_ROOT)) for text in texts]
        pool_tokens = engine_info().kv_pool_tokens
        assert found == sorted(found)
        assert 1 < sum(found) <= KEPT_BYTES_PER_TOKEN * pool_tokens / ENTRY_BYTES

    play(vocabulary, scene)


def test_what_chats_need_is_loaded_once_there_are_no_requests(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts under load gives its time to the answers."""
    monkeypatch.setattr(process, "PREPARE_AFTER_S", 1.0)  # the first request comes sooner
    prepared: list[str] = []
    monkeypatch.setattr(Vocabulary, "prepare_chats", lambda _: prepared.append("chats"))

    async def scene(stage: Stage) -> None:
        reading = asyncio.create_task(collect(stage, request()))
        sequence = await stage.sequence()
        await asyncio.sleep(1.5)
        assert not prepared
        stage.tokens(sequence.seq_id, stage.encode("a"), end=AnswerReport(finish_reason="stop"))
        await reading
        while not prepared:
            await asyncio.sleep(0.02)
        assert prepared == ["chats"]

    play(vocabulary, scene)


def test_answers_that_were_complete_at_a_takeover_leave_nothing(vocabulary: Vocabulary) -> None:
    """The client has not read them all yet, and hands them to the next engine."""

    async def scene(stage: Stage) -> None:
        complete = PartialAnswer(pack_ids([60]), is_complete=True)
        stage.client._send(replace(request(), resumed=[complete]))
        await stage.all_read()
        while stage.process._in_flight.any:
            await asyncio.sleep(0.01)

    play(vocabulary, scene)


def test_a_prompt_that_fails_ends_the_compiling_of_its_grammar(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        is_compiling, has_ended = asyncio.Event(), asyncio.Event()

        async def compile_slowly(constraint: object, tenant: str) -> None:
            is_compiling.set()
            try:
                await asyncio.sleep(60)
            finally:
                has_ended.set()

        stage.process._constraints.compile = compile_slowly  # type: ignore[method-assign, assignment]
        endless = TokenPrompt(pack_ids([5] * 100_000))
        with pytest.raises(RequestError):
            await collect(stage, replace(request(), prompt=endless, constraint=AnyJson()))
        await asyncio.wait_for(has_ended.wait(), 1)
        assert is_compiling.is_set()

    play(vocabulary, scene)


def test_a_call_whose_reply_cannot_be_sent_gets_an_error(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(vocabulary, "decode", lambda *_: "\ud800")
        with pytest.raises(RequestError, match="log says more"):
            await stage.client.call(DetokenizeCall(pack_ids([5])))

    play(vocabulary, scene)
