"""How is a hole filled? Wait for what comes before it, send the call, read the answer as its type."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from radixrt.lang.answer import Answer
from radixrt.lang.backends.protocol import CacheHints, Call, ChoiceCall, Piece, Prompt
from radixrt.lang.errors import AnswerError, locate, unreadable
from radixrt.lang.expressions import Gen, Select
from radixrt.lang.hole import Filling, Hole
from radixrt.lang.records import CallRecord, tail_of
from radixrt.lang.run import Run
from radixrt.lang.scoring import likeliest
from radixrt.lang.tools import ToolAnswer, as_tools, read_calls
from radixrt.lang.transcript import Transcript
from radixrt.lang.typed import AnswerType, answer_type, one_of


@dataclass(frozen=True)
class Site:
    """Where a call stands in a program."""

    run: Run
    before: Transcript
    hole: Hole
    hints: CacheHints
    record: CallRecord

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[tuple[Prompt, bool]]:
        """A block to send the call in. Gives what it answers, once all of it is known; and whether it continues the last
        message."""
        for hole in self.before.holes():
            await hole.wait_async()
        prompt, continues = self.before.as_prompt()
        self.record.prompt_tail = tail_of(prompt)
        self.record.ready_at = time.monotonic()
        async with self.run.admission(prompt, self.record):
            self.record.sent_at = time.monotonic()
            yield prompt, continues

    def tell(self, text: str) -> None:
        """More of the hole's text is there."""
        if self.record.first_piece_at is None:
            self.record.first_piece_at = time.monotonic()
        if text:
            self.hole.pieces.append(text)
            self.run.changes.tell()


def generating(site: Site, gen: Gen) -> Coroutine[Any, Any, Filling]:
    """The work of a gen.

    Raises:
        ProgramError: its type, or one of its tools, can't be described. Raised at once.
    """
    kind = answer_type(gen)
    tools = as_tools(gen.tools)

    async def work() -> Filling:
        site.record.streamed = gen.stream or site.run.is_watched
        async with site.turn() as (prompt, continues):
            call = Call(
                prompt=prompt,
                continues=continues,
                sampling=gen.sampling.over(site.run.sampling),
                constraint=kind.constraint,
                n=gen.n,
                tools=tools,
                tool_choice=gen.tool_choice,
                stream=site.record.streamed,
                hints=site.hints,
            )
            answers = await _collect(site, site.run.backend.generate(call), gen.n)
        site.record.called = [
            f"{call['function']['name']}({call['function']['arguments']})"
            for call in answers[0].tool_calls
        ]
        return Filling(
            text=answers[0].text,
            value=_value(answers[0], gen, kind, site)
            if gen.n == 1
            else _values(answers, gen, kind, site),
            tool_calls=tuple(answers[0].tool_calls),
            finish_reason=answers[0].finish_reason,
            reasoning=answers[0].reasoning,
        )

    return _recorded(site, work)


def selecting(site: Site, select: Select) -> Coroutine[Any, Any, Filling]:
    """The work of a select."""

    async def work() -> Filling:
        async with site.turn() as (prompt, continues):
            if select.method == "constrained":
                choice = await _written_choice(site, select, prompt, continues)
            else:
                choice = await _likeliest_choice(site, select, prompt, continues)
        return Filling(choice, choice)

    return _recorded(site, work)


async def _written_choice(site: Site, select: Select, prompt: Prompt, continues: bool) -> str:
    """The choice that the model writes, held to them.

    Raises:
        AnswerError: it was cut off.
    """
    kind = one_of(select.choices)
    call = Call(
        prompt=prompt,
        continues=continues,
        sampling=site.run.sampling,
        constraint=kind.constraint,
        hints=site.hints,
    )
    (answer,) = await _collect(site, site.run.backend.generate(call), 1)
    choice: str = _read(answer, kind)
    return choice


async def _likeliest_choice(site: Site, select: Select, prompt: Prompt, continues: bool) -> str:
    call = ChoiceCall(
        prompt=prompt,
        continues=continues,
        choices=select.choices,
        unconditional=select.method == "unconditional_likelihood_normalized",
        hints=site.hints,
    )
    scored = await site.run.backend.score(call)
    site.record.usage = scored.usage
    choice = select.choices[likeliest(scored.scores, select.method)]
    site.tell(choice)
    return choice


async def _recorded(site: Site, work: Callable[[], Coroutine[Any, Any, Filling]]) -> Filling:
    try:
        return await work()
    except asyncio.CancelledError:
        site.record.error = "It was cancelled."
        raise
    except Exception as error:
        locate(error, site.hole.source, site.hole.what)
        site.record.error = str(error)
        raise
    finally:
        site.record.answer = "".join(site.hole.pieces)
        site.record.ended_at = time.monotonic()


async def _collect(site: Site, pieces: AsyncGenerator[Piece, None], n: int) -> list[Answer]:
    """All of a call's answers; the first one's text is told as it comes."""
    answers = [Answer() for _ in range(n)]
    async with aclosing(pieces):
        async for piece in pieces:
            answers[piece.index].add(piece)
            if piece.usage is not None:
                site.record.usage = piece.usage
            site.record.times = piece.times or site.record.times
            if piece.index == 0:
                site.tell(piece.text)
    return answers


def _values(answers: list[Answer], gen: Gen, kind: AnswerType, site: Site) -> list[Any]:
    """Of several answers. In the place of one that is not of the type stands its AnswerError, so that it loses no other.

    Raises:
        AnswerError: none is of the type.
    """
    values: list[Any] = []
    for answer in answers:
        try:
            values.append(_value(answer, gen, kind, site))
        except AnswerError as error:
            locate(error, site.hole.source, site.hole.what)
            values.append(error)
    if all(isinstance(value, AnswerError) for value in values):
        raise values[0]
    return values


def _value(answer: Answer, gen: Gen, kind: AnswerType, site: Site) -> Any:
    """Raises:
    AnswerError: the answer is not of the type that was asked for.
    """
    if gen.tools:
        notes = site.run.record.tools_of(site.record.branch)
        calls = read_calls(answer.tool_calls, gen.tools, notes)
        return ToolAnswer(answer.text, calls, None if calls else _read(answer, kind))
    return _read(answer, kind)


def _read(answer: Answer, kind: AnswerType) -> Any:
    """Raises:
    AnswerError: the answer is not of that type, or was cut off where more may follow.
    """
    cut_off = answer.finish_reason == "length"
    try:
        value = kind.read(answer.text)
    except ValueError as error:
        raise unreadable(answer.text, kind.description, error, cut_off) from error
    if cut_off and not kind.is_whole(answer.text):
        raise unreadable(answer.text, kind.description, "more may follow", cut_off)
    return value
