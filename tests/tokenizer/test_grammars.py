"""What of grammars crosses the wire from the tokenizer process to the scheduler, and when."""

import asyncio
import json

import msgspec
import pytest

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Choice, Constraint, JsonSchema, Regex
from radixrt.constrained.grammar import Grammar
from radixrt.messages.answers import AnswerChunk, AnswerReport
from radixrt.messages.grammars import DropGrammar, LoadGrammar
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import GenerateRequest, RequestOptions, TextPrompt
from radixrt.messages.sequences import (
    ReleaseSequences,
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.test_process import Stage, collect, play, vocabulary

__all__ = ["vocabulary"]

UNIQUE = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "word": {"enum": [f"word {number}" for number in range(1000)]},
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
END_TOKEN = 1


def request(constraint: Constraint, n: int = 1, name: str = "r") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt=TextPrompt("hi"),
        options=RequestOptions(sampling=SamplingParams(n=n, seed=1)),
        constraint=constraint,
    )


async def message(stage: Stage) -> msgspec.Struct:
    """The next one to the scheduler; the first grammar waits for the compiler's start."""
    return await asyncio.wait_for(stage.at_scheduler.receive(), 60)


async def messages(stage: Stage, count: int) -> list[msgspec.Struct]:
    return [await message(stage) for _ in range(count)]


def write(stage: Stage, sequence: SequenceRequest, text: str) -> None:
    """Let a sequence end with a text, a token a character; what it had kept is not written
    again."""
    ids = [token for character in text for token in stage.encode(character)]
    end = AnswerReport(finish_reason="stop")
    stage.tokens(sequence.seq_id, [*ids[sequence.num_output :], END_TOKEN], end)


def test_eight_answers_and_their_retries_send_the_source_once(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        held = request(JsonSchema(schema=json.dumps(UNIQUE)), n=8)
        answering = asyncio.create_task(collect(stage, held))
        sent = await messages(stage, 9)
        load, *sequences = sent
        assert isinstance(load, LoadGrammar)
        for sequence in sequences:
            assert isinstance(sequence, SequenceRequest)
            write(stage, sequence, '{"numbers": [4, 4]}')
        again = await messages(stage, 16)
        sent += again
        for sequence in again:
            if isinstance(sequence, SequenceRequest):
                assert sequence.num_output and sequence.grammar is not None
                assert sequence.grammar.excluded and sequence.grammar.key == load.grammar.key
                write(stage, sequence, '{"numbers": [4, 5]}')
        chunks = await answering
        assert {chunk.text for chunk in chunks} == {'{"numbers": [4, 5]}'} and len(chunks) == 8

        frames = [msgspec.msgpack.encode(one) for one in sent]
        with_source = [frame for frame in frames if load.grammar.source in frame]
        assert with_source == frames[:1]
        assert sum(isinstance(one, SequenceRequest) for one in sent) == 16
        assert all(len(frame) < 500 for frame in frames[1:])
        assert sum(map(len, frames)) < 2 * len(load.grammar.source)

    play(vocabulary, scene)


def test_requests_for_equal_grammars_share_one(vocabulary: Vocabulary) -> None:
    async def scene(stage: Stage) -> None:
        asked = [Choice(options=("a",)), Choice(options=("a",)), Regex(pattern="a")]
        keys = []
        for index, constraint in enumerate(asked):
            answering = asyncio.create_task(collect(stage, request(constraint, name=str(index))))
            if index == 0:
                assert isinstance(await message(stage), LoadGrammar)
            sequence = await message(stage)
            assert isinstance(sequence, SequenceRequest) and sequence.grammar is not None
            keys.append(sequence.grammar.key)
            write(stage, sequence, "a")
            await answering
        assert len(set(keys)) == 1

    play(vocabulary, scene)


def test_an_unused_grammar_is_dropped_after_its_sequences_and_sent_again(
    vocabulary: Vocabulary,
) -> None:
    async def scene(stage: Stage) -> None:
        stage.process._schedulers.links[0].grammars._max_idle = 0
        for _ in range(2):
            held = request(Choice(options=("abc",)), n=2)
            generating = asyncio.create_task(collect(stage, held))
            load, one, other = await messages(stage, 3)
            assert isinstance(load, LoadGrammar)
            assert isinstance(one, SequenceRequest) and isinstance(other, SequenceRequest)
            write(stage, one, "abc")
            await stage.all_read()
            generating.cancel()  # the client goes away while the other is generated
            release, drop = await messages(stage, 2)
            assert isinstance(release, ReleaseSequences)
            assert unpack_ids(release.seq_ids).tolist() == [other.seq_id]
            assert drop == DropGrammar(load.grammar.key)

    play(vocabulary, scene)


def test_a_grammar_that_the_scheduler_lacks_fails_its_request_and_is_sent_again(
    vocabulary: Vocabulary,
) -> None:
    async def scene(stage: Stage) -> None:
        for _ in range(2):
            held = request(Choice(options=("abc",)), n=2)
            answering: asyncio.Task[list[AnswerChunk]] = asyncio.create_task(collect(stage, held))
            load, one, other = await messages(stage, 3)
            assert isinstance(load, LoadGrammar)
            refused = [
                SequenceRefused(sequence.seq_id, "Lost.", 500, grammar_lost=True)
                for sequence in (one, other)
                if isinstance(sequence, SequenceRequest)
            ]
            stage.from_scheduler.send(TokenBatch(refused=refused))
            with pytest.raises(RequestError, match=r"Lost\."):
                await answering
            release, drop = await messages(stage, 2)
            assert isinstance(release, ReleaseSequences)
            assert drop == DropGrammar(load.grammar.key)

    play(vocabulary, scene)


# ---------------------------------------------------------------- the bounds of unused grammars


def grammar(name: str, num_bytes: int = 10) -> Grammar:
    return Grammar.compiled("llguidance", name.encode().ljust(num_bytes))


def test_the_least_recently_used_grammars_are_dropped_over_the_bounds() -> None:
    sent: list[msgspec.Struct] = []
    grammars = SentGrammars(sent.append, max_idle_bytes=100, max_idle_grammars=2)
    a, b, c, large = grammar("a"), grammar("b"), grammar("c"), grammar("large", 101)
    for one in (a, b, a, c):
        grammars.use(one)
        grammars.release(one.key)
    assert sent == [LoadGrammar(a), LoadGrammar(b), LoadGrammar(c), DropGrammar(b.key)]
    grammars.use(a)
    grammars.use(large)
    grammars.use(large)
    grammars.release(large.key)
    assert sent[4:] == [LoadGrammar(large)], "it has a user"
    grammars.release(large.key)
    assert sent[5:] == [DropGrammar(c.key), DropGrammar(large.key)]
    grammars.release(a.key)
    grammars.use(b)
    assert sent[7:] == [LoadGrammar(b)]
