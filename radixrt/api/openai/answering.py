"""Responses of chat and completions: whole, or as a stream of events."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request, Response

from radixrt.api.conversations.continuation import ConversationRecorder
from radixrt.api.http.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.requests.protocol import GenerationFields
from radixrt.api.responses import Usage, times_extras
from radixrt.api.state import ServerState
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import GenerateRequest

ChoiceDelta = tuple[dict[str, Any], dict[str, Any]]
"""A choice or, in a stream, a piece of one; and fields of the response beside the choices."""


Fields = TypeVar("Fields", bound=GenerationFields)


@dataclass(frozen=True)
class PreparedRequest(Generic[Fields]):
    """One HTTP request, read and ready to run."""

    fields: Fields
    id: str
    requests: list[GenerateRequest]
    """One a prompt."""
    constraint_field: str
    """The field that holds the constraint; "": there is none."""
    recorder: ConversationRecorder | None
    """Of the conversation, if it is to be kept."""


class Answering(ABC, Generic[Fields]):
    """The response to one HTTP request.

    Attributes:
        kind: the response's ``object``.
        kind_of_event: that of an event of its stream.
        hides_output: the request wants no answer; one token is generated and thrown away.
    """

    kind: str
    kind_of_event: str
    hides_output = False

    def __init__(self, prepared: PreparedRequest[Fields]) -> None:
        self.prepared = prepared
        self.fields = prepared.fields

    @abstractmethod
    async def choices(self, prompt_index: int, chunk: AnswerChunk) -> list[ChoiceDelta]:
        """The choices, or pieces of choices, that a chunk adds to the response."""

    def beside_first(
        self, chunk: AnswerChunk, text: str, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Record (a piece of) the first answer; returns the fields of the response beside its choices.

        Args:
            text, calls: as the client gets them.
        """
        extras = times_extras(chunk.report) if self.fields.return_times else {}
        if self.prepared.recorder is not None:
            self.prepared.recorder.add(text, chunk.reasoning, calls)
            if chunk.finish_reason is not None:
                extras["kept"] = self.prepared.recorder.end(chunk.finish_reason)
        return extras


async def respond(answering: Answering[Any], request: Request, state: ServerState) -> Response:
    request.state.request_id = answering.prepared.id
    if answering.fields.stream:
        return EventStream(_stream(answering, state))
    return json_response(await while_connected(request, _whole(answering, state)))


async def _whole(answering: Answering[Any], state: ServerState) -> dict[str, Any]:
    usage = Usage(answering.hides_output)
    choices: list[dict[str, Any]] = []
    extras: dict[str, Any] = {}
    async with aclosing(_chunks(answering, state)) as chunks:
        async for prompt_index, chunk in chunks:
            usage.add(prompt_index, chunk)
            for choice, beside in await answering.choices(prompt_index, chunk):
                choices.append(choice)
                extras |= beside
    choices.sort(key=lambda choice: choice["index"])
    envelope = _envelope(answering, state, answering.kind, choices)
    return envelope | extras | usage.explanation() | {"usage": usage.as_json()}


async def _stream(answering: Answering[Any], state: ServerState) -> AsyncGenerator[bytes, None]:
    usage = Usage(answering.hides_output)
    options = answering.fields.stream_options
    explains = answering.prepared.requests[0].options.cache_hints.explain
    with_usage = explains or bool(options and options.include_usage)
    always = bool(options and options.continuous_usage_stats)

    def piece(choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope = _envelope(answering, state, answering.kind_of_event, choices)
        if always or with_usage:
            envelope["usage"] = usage.as_json() if always or not choices else None
        return envelope

    async with aclosing(_chunks(answering, state)) as chunks:
        async for prompt_index, chunk in chunks:
            usage.add(prompt_index, chunk)
            for choice, beside in await answering.choices(prompt_index, chunk):
                yield event(piece([choice]) | beside)
    if with_usage:
        yield event(piece([]) | usage.explanation())
    yield DONE


def _chunks(
    answering: Answering[Any], state: ServerState
) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
    return state.generate(answering.prepared.requests, answering.prepared.constraint_field)


def _envelope(
    answering: Answering[Any], state: ServerState, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": answering.prepared.id,
        "object": kind,
        "created": int(time.time()),
        "model": state.config.model_name,
        "system_fingerprint": state.fingerprint,
        "choices": choices,
    }
