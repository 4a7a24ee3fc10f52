"""Answers HTTP requests: runs their prompts and lets a formatter write the chunks, as a stream or as
one body."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson
from fastapi import Response

from radixrt.api.conversations.continuation import ConversationRecorder
from radixrt.api.http.events import DONE, EventStream, event
from radixrt.api.requests.protocol import GenerationFields
from radixrt.api.responses import Usage, progress_extras, times_extras
from radixrt.api.state import Context, ServerState
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import GenerateRequest

Fields = TypeVar("Fields", bound=GenerationFields)


@dataclass(frozen=True)
class Prepared:
    """One HTTP request, ready to run."""

    id: str
    requests: list[GenerateRequest]
    """One a prompt. Either all of them stream or none does."""
    constraint_field: str
    """The field that holds the constraint; "": there is none."""

    @property
    def streams(self) -> bool:
        return self.requests[0].stream


@dataclass(frozen=True)
class PreparedRequest(Prepared, Generic[Fields]):
    """A chat or completion."""

    fields: Fields
    recorder: ConversationRecorder | None
    """Keeps the conversation; None: it is not to be kept."""

    def check_one_answer(self) -> None:
        """Raises RequestError if the request asks for several answers."""
        if self.requests[0].sampling.n > 1:
            raise RequestError("There is one answer; leave n out.", param="n")

    def record(
        self, chunk: AnswerChunk, text: str, calls: list[dict[str, Any]], response: bytes = b""
    ) -> dict[str, Any]:
        """Record a piece of the first answer; returns ``kept`` with the last one, if the
        conversation is to be kept.

        Args:
            text, calls: as the client gets them.
            response: JSON of the response, if it can be retrieved.
        """
        if self.recorder is None:
            return {}
        self.recorder.add(text, chunk.reasoning, calls)
        if chunk.finish_reason is None:
            return {}
        return {"kept": self.recorder.end(chunk.finish_reason, response)}


class Formatter(ABC):
    """Writes the answers to one HTTP request in the form of an API.

    Attributes:
        last: the last bytes of a stream.
    """

    last = b""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._streams = prepared.streams
        self._parts: list[Any] = []
        """The parts of a response that is not streamed."""

    @abstractmethod
    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterable[Any]:
        """The events of a stream, or parts of a body, that a chunk adds. A part is encoded before
        the next one is taken."""

    def whole(self, parts: list[Any]) -> Any:
        """The body that consists of these parts."""
        return parts[0]

    def encoded(self, part: Any) -> bytes:
        """An event of a stream."""
        return event(part)

    def end(self) -> bytes:
        """What follows the events of all chunks: the end of a stream, or the whole body."""
        return self.last if self._streams else orjson.dumps(self.whole(self._parts))

    def failed(self, error: RequestError | EngineDiedError) -> bytes:
        """The end of a stream whose request has failed.

        Raises:
            RequestError, EngineDiedError: the response is the API's error object, or ends with it.
        """
        raise error

    def stream(self, events: AsyncGenerator[bytes, None]) -> Response:
        """The response that streams these events."""
        return EventStream(events)

    async def add(self, prompt_index: int, chunk: AnswerChunk) -> bytes:
        """Take a chunk; returns its events, if the response is a stream."""
        parts = await self.parts(prompt_index, chunk)
        if self._streams:
            return b"".join(map(self.encoded, parts))
        self._parts += parts
        return b""


async def respond(formatter: Formatter, context: Context) -> Response:
    """Run the prompts of a request, and let the formatter write their answers."""
    context.name(formatter.prepared.id)
    pieces = _pieces(formatter, context.state)
    if formatter.prepared.streams:
        return formatter.stream(pieces)
    return Response(await context.wait(_joined(pieces)), media_type="application/json")


async def _pieces(formatter: Formatter, state: ServerState) -> AsyncGenerator[bytes, None]:
    prepared = formatter.prepared
    try:
        with state.answers(prepared.requests, prepared.constraint_field) as answers:
            async for prompt_index, chunk in answers:
                if data := await formatter.add(prompt_index, chunk):
                    yield data
    except (RequestError, EngineDiedError) as error:
        yield formatter.failed(error)
        return
    if data := formatter.end():
        yield data


async def _joined(pieces: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([piece async for piece in pieces])


ChoiceDelta = tuple[dict[str, Any], dict[str, Any]]
"""A choice or, in a stream, a piece of one; and fields of the response beside the choices."""


class OpenAIFormatter(Formatter, Generic[Fields]):
    """Choices with an envelope around them.

    Attributes:
        kind: the response's ``object``.
        kind_of_event: that of an event of its stream.
        hides_output: the request wants no answer; one token is generated and thrown away.
    """

    kind: str
    kind_of_event: str
    hides_output = False
    last = DONE

    def __init__(self, prepared: PreparedRequest[Fields], state: ServerState) -> None:
        super().__init__(prepared)
        self._recorded = prepared
        self.fields = prepared.fields
        self._usage = Usage(self.hides_output)
        options = self.fields.stream_options
        explains = prepared.requests[0].options.cache_hints.explain
        self._ends_with_usage = explains or bool(options and options.include_usage)
        self._always_has_usage = bool(options and options.continuous_usage_stats)
        self._envelope = {
            "id": prepared.id,
            "object": self.kind_of_event if prepared.streams else self.kind,
            "created": int(time.time()),
            "model": prepared.requests[0].options.adapter_name or state.config.model_name,
            "system_fingerprint": state.fingerprint,
        }

    def encoded(self, part: ChoiceDelta) -> bytes:
        choice, beside = part
        return event(self._piece([choice]) | beside)

    def end(self) -> bytes:
        if not (self._streams and self._ends_with_usage):
            return super().end()
        return event(self._piece([]) | self._usage.explanation()) + DONE

    def whole(self, parts: list[ChoiceDelta]) -> dict[str, Any]:
        choices = sorted((choice for choice, _ in parts), key=lambda choice: choice["index"])
        body: dict[str, Any] = {**self._envelope, "choices": choices}
        for _, beside in parts:
            body |= beside
        return body | self._usage.explanation() | {"usage": self._usage.as_json()}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        piece = {**self._envelope, "choices": choices}
        if self._always_has_usage or self._ends_with_usage:
            has_usage = self._always_has_usage or not choices
            piece["usage"] = self._usage.as_json() if has_usage else None
        return piece

    def progress(
        self, prompt_index: int, chunk: AnswerChunk, choice: dict[str, Any]
    ) -> ChoiceDelta:
        """The event for a chunk with the progress of a prompt, with an empty ``choice``."""
        assert chunk.progress is not None
        index = prompt_index * self.prepared.requests[0].sampling.n
        empty = {"index": index, **choice, "logprobs": None, "finish_reason": None}
        return empty, progress_extras(chunk.progress)

    def beside_first(
        self, chunk: AnswerChunk, text: str, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Record (a piece of) the first answer; returns the fields of the response beside its
        choices."""
        times = times_extras(chunk.report) if self.fields.return_times else {}
        return times | self._recorded.record(chunk, text, calls)
