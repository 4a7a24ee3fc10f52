"""Executes a gen or select: waits for the calls before it, sends the call, and reads the answer as
its type."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from radixrt.lang.backends.protocol import (
    Call,
    ChoiceCall,
    PartialValue,
    Prompt,
    Score,
)
from radixrt.lang.errors import AnswerError, locate, unreadable
from radixrt.lang.expressions import Documents, Gen, Select, SelectMethod
from radixrt.lang.runtime.cached_order import cached_order
from radixrt.lang.runtime.placeholder import Completion, Placeholder, settled
from radixrt.lang.runtime.run import Run
from radixrt.lang.runtime.transcript import Transcript, text_of
from radixrt.lang.tools import ToolAnswer, read_calls
from radixrt.lang.tracing.records import CallRecord, tail_of
from radixrt.lang.typed import AnswerType


@dataclass(frozen=True)
class CallSite:
    """The place of a call in a program."""

    run: Run
    before: Transcript
    placeholder: Placeholder
    next_use_s: float | None

    @property
    def record(self) -> CallRecord:
        return self.placeholder.record

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A block for all of the call's work. The record gets its end; errors get the line of the
        program."""
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
            self.record.answer = "".join(self.placeholder.pieces)
            self.record.ended_at = time.monotonic()

    def locate(self, error: Exception) -> None:
        """Add the line of the program to an error."""
        locate(error, self.record.source, self.record.what)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[tuple[Prompt, bool]]:
        """A block to send the call in. Waits for everything before the call, and for its run's
        admission.

        Gives the prompt, and whether the call continues the last message.
        """
        for placeholder in self.before.placeholders():
            await placeholder.wait_async()
        prompt, continues = self.before.as_prompt()
        self.record.prompt_tail = tail_of(prompt)
        self.record.ready_at = time.monotonic()
        async with self.run.admission(prompt, self.record):
            self.record.sent_at = time.monotonic()
            yield prompt, continues

    def add_text(self, text: str, values: Sequence[PartialValue] = ()) -> None:
        """Append to the text of the answer and its complete values, and wake their readers."""
        if self.record.first_piece_at is None:
            self.record.first_piece_at = time.monotonic()
        if text:
            self.placeholder.pieces.append(text)
        self.placeholder.values += values
        if text or values:
            self.run.changes.increment()


async def compute_ahead(run: Run, before: Transcript) -> None:
    """Let the backend compute a transcript in idle time, once it is complete."""
    for placeholder in before.placeholders():
        await settled(placeholder.future)
        if placeholder.future.cancelled() or placeholder.future.exception() is not None:
            return
    prompt, _ = before.as_prompt()
    if prompt:
        await run.backend.compute_ahead(prompt)


async def generate(site: CallSite, gen: Gen, tools: tuple[dict[str, Any], ...]) -> Completion:
    """Execute a gen.

    Args:
        tools: the gen's tools, in OpenAI's form.
    """
    with site.noted():
        site.record.streamed = gen.stream or site.run.is_watched
        async with site.admitted() as (prompt, continues):
            call = Call(
                prompt=prompt,
                continues=continues,
                sampling=gen.sampling.over(site.run.sampling),
                constraint=gen.kind.constraint,
                n=gen.n,
                tools=tools,
                tool_choice=gen.tool_choice,
                stream=site.record.streamed,
                stream_values=gen.stream_values,
                next_use_s=site.next_use_s,
                adapter=gen.adapter,
            )
            answers = await _collect(site, call)
        first = answers[0]
        site.record.called = [
            f"{call['function']['name']}({call['function']['arguments']})"
            for call in first.tool_calls
        ]
        first.value = _value(first, gen, site) if gen.n == 1 else _values(answers, gen, site)
        return first


async def choose(site: CallSite, select: Select) -> Completion:
    """Execute a select."""
    with site.noted():
        async with site.admitted() as (prompt, continues):
            call = ChoiceCall(
                prompt=prompt,
                continues=continues,
                choices=select.choices,
                unconditional=select.method == "unconditional_likelihood_normalized",
                next_use_s=site.next_use_s,
                adapter=select.adapter,
            )
            scored = await site.run.backend.score(call)
            site.record.usage = scored.usage
        choice = select.choices[likeliest(scored.scores, select.method)]
        site.add_text(choice)
        return Completion(choice, choice)


async def arrange(site: CallSite, documents: Documents) -> Completion:
    """Order documents by what the backend has cached when the run is admitted."""
    with site.noted():
        by_rank = site.before.with_part(documents.text(range(len(documents.passages))))
        async with replace(site, before=by_rank).admitted():  # batches compare prompts by rank
            before = site.before.messages() or text_of(site.before.text)
            order = await cached_order(
                site.run.backend,
                before,
                documents.passages,
                documents.separator,
                documents.max_shift,
            )
        text = documents.text(order)
        site.add_text(text)
        return Completion(text, order)


def likeliest(scores: Sequence[Score], method: SelectMethod) -> int:
    """The index of the likeliest choice by a method; of equal ones, the first."""
    most_tokens = max(len(score.logprobs) for score in scores)

    def key(score: Score) -> tuple[float, ...]:
        if method == "greedy_token_selection":
            # A shorter choice is extended by its own mean, so that its length neither helps nor
            # harms it.
            missing = most_tokens - len(score.logprobs)
            return (*score.logprobs, *[fmean(score.logprobs)] * missing)
        if method == "unconditional_likelihood_normalized":
            return (fmean(score.logprobs) - fmean(score.unconditional),)
        return (fmean(score.logprobs),)

    return max(range(len(scores)), key=lambda index: key(scores[index]))


async def _collect(site: CallSite, call: Call) -> list[Completion]:
    """All answers of a call. The text of the first one is passed on as it comes."""
    answers = [Completion() for _ in range(call.n)]
    async with aclosing(site.run.backend.generate(call)) as pieces:
        async for piece in pieces:
            answers[piece.index].add(piece)
            site.record.usage = piece.usage or site.record.usage
            site.record.times = piece.times or site.record.times
            if piece.index == 0:
                site.add_text(piece.text, piece.values)
    return answers


def _values(answers: list[Completion], gen: Gen, site: CallSite) -> list[Any]:
    """The values of several answers. An answer that is not of its type is replaced by its
    AnswerError.

    Raises:
        AnswerError: no answer is of the type.
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


def _value(answer: Completion, gen: Gen, site: CallSite) -> Any:
    """Raises AnswerError if the answer is not of the type that was asked for."""
    if not gen.tools:
        return _read(answer, gen.kind)
    notes = site.run.record.tools_of(site.record.branch)
    calls = read_calls(answer.tool_calls, gen.tools, notes)
    return ToolAnswer(answer.text, calls, None if calls else _read(answer, gen.kind))


def _read(answer: Completion, kind: AnswerType) -> Any:
    """Raises AnswerError if the answer is not of that type, or was cut off where more may follow."""
    cut_off = answer.finish_reason == "length"
    try:
        value = kind.read(answer.text)
    except ValueError as error:
        raise unreadable(answer.text, kind.description, error, cut_off) from error
    if cut_off and not kind.is_whole(answer.text):
        raise unreadable(answer.text, kind.description, "more may follow", cut_off)
    return value
