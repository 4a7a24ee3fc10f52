"""``/v1/responses``: makes, retrieves and deletes responses."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from radixrt.api.conversations.continuation import access_key_of
from radixrt.api.conversations.store import CONVERSATION_GONE, conversation_gone
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import as_request_error
from radixrt.api.http.events import EventStream, event, json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import chat_entries
from radixrt.api.openai.chat import PreparedChat, prepare_chat
from radixrt.api.openai_responses.events import Event, ResponseEvents
from radixrt.api.openai_responses.protocol import ResponsesRequest, refuse_unsupported_fields
from radixrt.api.openai_responses.translation import to_chat
from radixrt.api.requests.custom_tools import CustomCalls
from radixrt.api.requests.json_text import json_text
from radixrt.api.requests.tools import call_delta
from radixrt.api.state import ServerState
from radixrt.base.errors import EngineDiedError, RequestError


def response_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/responses", ResponsesRequest, refuse_unsupported_fields)
    async def responses(request: Request, fields: ResponsesRequest) -> Response:
        with _unknown_response(400, "previous_response_id"):
            instructions = fields.instructions or ""
            prepared = prepare_chat(to_chat(fields), state, request, "resp", instructions)
        if prepared.requests[0].sampling.n > 1:
            raise RequestError("A response is one answer; leave n out.", param="n")
        request.state.request_id = prepared.id
        sampling = prepared.requests[0].sampling
        made = ResponseEvents(fields, prepared.id, state.config.model_name, sampling)
        json_text(made.response)  # the response returns its metadata, tools and format
        if fields.stream:
            return EventStream(_stream(made, prepared, state))
        return json_response(await while_connected(request, _whole(made, prepared, state)))

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
    """That of a request whose body has this salt."""
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


async def _events(
    made: ResponseEvents, prepared: PreparedChat, state: ServerState
) -> AsyncGenerator[Event, None]:
    recorder, custom = prepared.recorder, CustomCalls(prepared.fields.tools)
    async with aclosing(state.generate(prepared.requests, prepared.constraint_field)) as chunks:
        async for _, chunk in chunks:
            calls = [call_delta(call) for call in chunk.tool_calls]
            logprobs = await chat_entries(chunk.logprobs)
            for one in made.of(chunk, custom.of(calls), logprobs):
                yield one
            if recorder is None:
                continue
            recorder.add(chunk.text, chunk.reasoning, calls)
            if chunk.finish_reason is not None:
                recorder.end(chunk.finish_reason, orjson.dumps(made.response))


async def _stream(
    made: ResponseEvents, prepared: PreparedChat, state: ServerState
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    try:
        async with aclosing(_events(made, prepared, state)) as events:
            async for one in events:
                has_begun = True
                yield event(one, one["type"])
    except (RequestError, EngineDiedError) as error:
        if not has_begun:
            raise
        for one in made.failed(as_request_error(error)):
            yield event(one, one["type"])


async def _whole(
    made: ResponseEvents, prepared: PreparedChat, state: ServerState
) -> dict[str, Any]:
    async with aclosing(_events(made, prepared, state)) as events:
        async for _ in events:
            pass
    return made.response
