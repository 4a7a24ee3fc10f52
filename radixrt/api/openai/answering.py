"""Responses of chat and completions: whole, or as a stream of events."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

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


class Answering(ABC):
    """The response to one HTTP request.

    Attributes:
        kind: the response's ``object``.
        kind_of_event: that of an event of its stream.
        hides_output: the request wants no answer; one token is generated and thrown away.
    """

    kind: str
    kind_of_event: str
    hides_output = False

    def __init__(
        self,
        fields: GenerationFields,
        response_id: str,
        requests: list[GenerateRequest],
        constraint_field: str,
        recorder: ConversationRecorder | None,
    ) -> None:
        """
        Args:
            requests: one a prompt.
            constraint_field: the field that holds the request's constraint; "": it has none.
            recorder: of the conversation, if it is to be kept.
        """
        self.fields = fields
        self.id = response_id
        self.requests = requests
        self.constraint_field = constraint_field
        self._recorder = recorder

    @abstractmethod
    def choices(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[ChoiceDelta]:
        """The choices, or pieces of choices, that a chunk adds to the response."""

    def beside_first(
        self, chunk: AnswerChunk, text: str, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Record (a piece of) the first answer; returns the fields of the response beside its choices.

        Args:
            text, calls: as the client gets them.
        """
        extras = times_extras(chunk.report) if self.fields.return_times else {}
        if self._recorder is not None:
            self._recorder.add(text, chunk.reasoning, calls)
            if chunk.finish_reason is not None:
                extras["kept"] = self._recorder.end(chunk.finish_reason)
        return extras


async def respond(answering: Answering, request: Request, state: ServerState) -> Response:
    request.state.request_id = answering.id
    if answering.fields.stream:
        return EventStream(_stream(answering, state))
    return json_response(await while_connected(request, _whole(answering, state)))


async def _whole(answering: Answering, state: ServerState) -> dict[str, Any]:
    usage = Usage(answering.hides_output)
    choices: list[dict[str, Any]] = []
    extras: dict[str, Any] = {}
    async with aclosing(_choices(answering, state, usage)) as found:
        async for choice, beside in found:
            choices.append(choice)
            extras |= beside
    choices.sort(key=lambda choice: choice["index"])
    envelope = _envelope(answering, state, answering.kind, choices)
    return envelope | extras | {"usage": usage.as_json()}


async def _stream(answering: Answering, state: ServerState) -> AsyncGenerator[bytes, None]:
    usage = Usage(answering.hides_output)
    options = answering.fields.stream_options
    with_usage = bool(options and options.include_usage)
    always = bool(options and options.continuous_usage_stats)

    def piece(choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope = _envelope(answering, state, answering.kind_of_event, choices)
        if always or with_usage:
            envelope["usage"] = usage.as_json() if always or not choices else None
        return envelope

    async with aclosing(_choices(answering, state, usage)) as found:
        async for choice, beside in found:
            yield event(piece([choice]) | beside)
    if with_usage:
        yield event(piece([]))
    yield DONE


async def _choices(
    answering: Answering, state: ServerState, usage: Usage
) -> AsyncGenerator[ChoiceDelta, None]:
    running = state.generate(answering.requests, answering.constraint_field)
    async with aclosing(running) as chunks:
        async for prompt_index, chunk in chunks:
            usage.add(prompt_index, chunk)
            for choice in answering.choices(prompt_index, chunk):
                yield choice


def _envelope(
    answering: Answering, state: ServerState, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": answering.id,
        "object": kind,
        "created": int(time.time()),
        "model": state.config.model_name,
        "choices": choices,
    }
