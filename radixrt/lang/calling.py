"""How is a hole filled? Wait for what comes before it, send the call, read the answer as its type."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from radixrt.lang.answer import Answer
from radixrt.lang.backends.protocol import CacheHints, Call, ChoiceCall, Prompt
from radixrt.lang.errors import AnswerError, locate, unreadable
from radixrt.lang.expressions import Gen, Select
from radixrt.lang.hole import Filling, Hole
from radixrt.lang.records import CallRecord, tail_of
from radixrt.lang.run import Run
from radixrt.lang.scoring import likeliest
from radixrt.lang.tools import ToolAnswer, read_calls
from radixrt.lang.transcript import Transcript
from radixrt.lang.typed import AnswerType


@dataclass(frozen=True)
class Site:
    """Where a call stands in a program."""

    run: Run
    before: Transcript
    hole: Hole
    hints: CacheHints

    @property
    def record(self) -> CallRecord:
        return self.hole.record

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A block for all of the call's work: the record says how it ends, and its errors which line it belongs to."""
        try:
            yield
        except asyncio.CancelledError:
            self.record.error = "It was cancelled."
            raise
        except Exception as error:
            self.locate(error)
            self.record.error = str(error)
            raise
        finally:
            self.record.answer = "".join(self.hole.pieces)
            self.record.ended_at = time.monotonic()

    def locate(self, error: Exception) -> None:
        """Say in an error which line of the program it belongs to."""
        locate(error, self.record.source, self.record.what)

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


async def generating(site: Site, gen: Gen, tools: tuple[dict[str, Any], ...]) -> Filling:
    """The work of a gen.

    Args:
        tools: the gen's, in OpenAI's form.
    """
    with site.noted():
        site.record.streamed = gen.stream or site.run.is_watched
        async with site.turn() as (prompt, continues):
            call = Call(
                prompt=prompt,
                continues=continues,
                sampling=gen.sampling.over(site.run.sampling),
                constraint=gen.kind.constraint,
                n=gen.n,
                tools=tools,
                tool_choice=gen.tool_choice,
                stream=site.record.streamed,
                hints=site.hints,
            )
            answers = await _collect(site, call)
        first = answers[0]
        site.record.called = [
            f"{call['function']['name']}({call['function']['arguments']})"
            for call in first.tool_calls
        ]
        return Filling(
            text=first.text,
            value=_value(first, gen, site) if gen.n == 1 else _values(answers, gen, site),
            tool_calls=tuple(first.tool_calls),
            finish_reason=first.finish_reason,
            reasoning=first.reasoning,
        )


async def selecting(site: Site, select: Select) -> Filling:
    """The work of a select."""
    with site.noted():
        async with site.turn() as (prompt, continues):
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
        return Filling(choice, choice)


async def _collect(site: Site, call: Call) -> list[Answer]:
    """All of a call's answers; the first one's text is told as it comes."""
    answers = [Answer() for _ in range(call.n)]
    async with aclosing(site.run.backend.generate(call)) as pieces:
        async for piece in pieces:
            answers[piece.index].add(piece)
            site.record.usage = piece.usage or site.record.usage
            site.record.times = piece.times or site.record.times
            if piece.index == 0:
                site.tell(piece.text)
    return answers


def _values(answers: list[Answer], gen: Gen, site: Site) -> list[Any]:
    """Of several answers. In the place of one that is not of the type stands its AnswerError, so that it loses no other.

    Raises:
        AnswerError: none is of the type.
    """
    values: list[Any] = []
    for answer in answers:
        try:
            values.append(_value(answer, gen, site))
        except AnswerError as error:
            site.locate(error)
            values.append(error)
    if all(isinstance(value, AnswerError) for value in values):
        raise values[0]
    return values


def _value(answer: Answer, gen: Gen, site: Site) -> Any:
    """Raises:
    AnswerError: the answer is not of the type that was asked for.
    """
    if not gen.tools:
        return _read(answer, gen.kind)
    notes = site.run.record.tools_of(site.record.branch)
    calls = read_calls(answer.tool_calls, gen.tools, notes)
    return ToolAnswer(answer.text, calls, None if calls else _read(answer, gen.kind))


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
