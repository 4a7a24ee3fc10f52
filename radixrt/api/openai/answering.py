"""How does OpenAI's API answer? Whole or as a stream of events, chat and completions alike."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from radixrt.api.conversations.continuation import Keeper
from radixrt.api.http.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.openai.constraint import constraint_field
from radixrt.api.openai.formats import Usage, times_extras
from radixrt.api.openai.protocol import GenerationFields
from radixrt.api.state import ServerState
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import GenerateRequest

Part = tuple[dict[str, Any], dict[str, Any]]
"""A choice or, in a stream, a piece of one; and what the response says beside the choices."""


class Answering(ABC):
    """One request under way.

    Attributes:
        kind: what the response is an object of.
        kind_of_event: what an event of its stream is one of.
        hides_output: no answer is wanted; one token is generated and thrown away.
    """

    kind: str
    kind_of_event: str
    hides_output = False

    def __init__(
        self,
        fields: GenerationFields,
        response_id: str,
        requests: list[GenerateRequest],
        keeper: Keeper | None,
    ) -> None:
        """
        Args:
            requests: one a prompt.
            keeper: of a conversation that is to be remembered.
        """
        self.fields = fields
        self.id = response_id
        self.requests = requests
        self._keeper = keeper

    @abstractmethod
    def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[Part]:
        """What a chunk adds to the response."""

    def beside_first(
        self, chunk: AnswerChunk, text: str, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Take note of (a piece of) the first answer; what the response says beside it.

        Args:
            text, calls: as the client gets them.
        """
        extras = times_extras(chunk) if self.fields.return_times else {}
        if self._keeper is not None:
            self._keeper.add(text, chunk.reasoning, calls)
            if chunk.finish_reason is not None:
                extras["kept"] = self._keeper.end(chunk.finish_reason)
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
    async with aclosing(_parts(answering, state, usage)) as parts:
        async for choice, beside in parts:
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

    async with aclosing(_parts(answering, state, usage)) as parts:
        async for choice, beside in parts:
            yield event(piece([choice]) | beside)
    if with_usage:
        yield event(piece([]))
    yield DONE


async def _parts(
    answering: Answering, state: ServerState, usage: Usage
) -> AsyncGenerator[Part, None]:
    field = constraint_field(answering.fields)
    async with aclosing(state.generate(answering.requests, field)) as chunks:
        async for prompt_index, chunk in chunks:
            usage.add(prompt_index, chunk)
            for part in answering.parts(prompt_index, chunk):
                yield part


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
