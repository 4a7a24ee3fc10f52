"""``/v1/responses``: makes, retrieves and deletes responses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from radixrt.api.answering import Formatter, respond
from radixrt.api.conversations.continuation import access_key_of
from radixrt.api.conversations.store import CONVERSATION_GONE, conversation_gone
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import as_request_error
from radixrt.api.http.events import event, json_response
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import chat_entries
from radixrt.api.openai.chat import PreparedChat, prepare_chat
from radixrt.api.openai_responses.events import Event, ResponseEvents
from radixrt.api.openai_responses.protocol import ResponsesRequest, refuse_unsupported_fields
from radixrt.api.openai_responses.translation import to_chat
from radixrt.api.requests.messages import json_text
from radixrt.api.requests.tools import CustomCalls, call_delta
from radixrt.api.state import ServerState
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.messages.answers import AnswerChunk


def response_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/responses", ResponsesRequest, refuse_unsupported_fields)
    async def responses(request: Request, fields: ResponsesRequest) -> Response:
        with _unknown_response(400, "previous_response_id"):
            instructions = fields.instructions or ""
            prepared = prepare_chat(to_chat(fields), state, request, "resp", instructions)
        prepared.check_one_answer()
        sampling = prepared.requests[0].sampling
        made = ResponseEvents(fields, prepared.id, state.config.model_name, sampling)
        json_text(made.response)  # the response returns its metadata, tools and format
        return await respond(_Response(made, prepared), prepared, request, state)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(
        request: Request, response_id: str, cache_salt: str | None = None
    ) -> Response:
        with _unknown_response(404, "response_id"):
            found = state.conversations.find(response_id, _access_key(request, cache_salt))
            if not found.response:
                raise conversation_gone()
        return Response(found.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(
        request: Request, response_id: str, cache_salt: str | None = None
    ) -> Response:
        with _unknown_response(404, "response_id"):
            state.conversations.hide(response_id, _access_key(request, cache_salt))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router


def _access_key(request: Request, cache_salt: str | None) -> bytes:
    """The access key of a request whose body has this salt."""
    return access_key_of(request, caller_of(request).tenant.salt(cache_salt))


@contextmanager
def _unknown_response(status: int, param: str) -> Iterator[None]:
    """Let errors about a kept conversation speak of a response."""
    try:
        yield
    except RequestError as error:
        if error.code != CONVERSATION_GONE:
            raise
        raise RequestError(
            "This response is not stored, or not any more.",
            status=status,
            param=param,
            code="previous_response_not_found" if status == 400 else None,
        ) from error


class _Response(Formatter):
    def __init__(self, made: ResponseEvents, prepared: PreparedChat) -> None:
        super().__init__(prepared)
        self._made = made
        self._prepared = prepared
        self._custom = CustomCalls(prepared.fields.tools)
        self._has_begun = False

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[Event]:
        self._has_begun = True
        return self._events(chunk, await chat_entries(chunk.logprobs))

    def _events(self, chunk: AnswerChunk, logprobs: list[orjson.Fragment]) -> Iterator[Event]:
        calls = [call_delta(call) for call in chunk.tool_calls]
        yield from self._made.from_chunk(chunk, self._custom.client_calls(calls), logprobs)
        response = b"" if chunk.finish_reason is None else orjson.dumps(self._made.response)
        self._prepared.record(chunk, chunk.text, calls, response)

    def encoded(self, part: Event) -> bytes:
        return event(part, part["type"])

    def whole(self, parts: list[Event]) -> dict[str, Any]:
        return self._made.response

    def failed(self, error: RequestError | EngineDiedError) -> bytes:
        if not (self._streams and self._has_begun):
            raise error
        return b"".join(map(self.encoded, self._made.failed(as_request_error(error))))
