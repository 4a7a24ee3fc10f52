"""``/v1/messages`` and ``/v1/messages/count_tokens``, and the form of their errors."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.anthropic.events import Event, MessageEvents, whole_message
from radixrt.api.anthropic.protocol import (
    CountTokensRequest,
    MessagesRequest,
    refuse_unsupported_fields,
)
from radixrt.api.anthropic.translation import to_chat
from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import ErrorShape
from radixrt.api.http.events import EventStream, event, json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import chat_entries
from radixrt.api.openai.chat import PreparedChat, prepare_chat
from radixrt.api.requests.prompts import chat_prompt
from radixrt.api.requests.tools import call_delta
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.messages.calls import TokenizeCall

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


_FIELDS = {"max_reasoning_tokens": "thinking.budget_tokens", "stop": "stop_sequences"}
"""Names of fields, by those of chat."""


def error_body(error: RequestError) -> dict[str, Any]:
    """Anthropic's error object. ``param`` and ``code`` are ours."""
    param = error.param
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words that clients look for
    if param in _FIELDS:
        message = message.replace(param, _FIELDS[param], 1)
        param = _FIELDS[param]
    kind = _ERROR_TYPES.get(error.status, fallback)
    inner = {"type": kind, "message": message, "param": param, "code": error.code}
    return {"type": "error", "error": inner}


ERRORS = ErrorShape("/v1/messages", error_body, "error")


def message_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/messages", MessagesRequest, refuse_unsupported_fields)
    async def messages(request: Request, fields: MessagesRequest) -> Response:
        if fields.max_tokens is None:
            raise RequestError("max_tokens is missing.", param="max_tokens")
        chat = to_chat(fields)
        if state.config.reasoning_parser == "none" or chat.continue_final_message:
            chat.max_reasoning_tokens = fields.max_reasoning_tokens  # there is nothing to bound
        prepared = prepare_chat(chat, state, request, "msg")
        if prepared.requests[0].sampling.n > 1:
            raise RequestError("A message is one answer; leave n out.", param="n")
        request.state.request_id = prepared.id
        events = _events(prepared, state)
        if fields.stream:
            return EventStream(_encoded(events))
        return json_response(await while_connected(request, _whole(events)))

    @router.takes("/v1/messages/count_tokens", CountTokensRequest, refuse_unsupported_fields)
    async def count_tokens(request: Request, fields: CountTokensRequest) -> Response:
        chat = to_chat(fields)
        continuation = Continuation.of(chat, "messages", state.conversations, request)
        prompt = chat_prompt(chat, chat.messages, continuation.messages)
        call = TokenizeCall(prompt, caller_of(request).tenant, fields.cache_salt or "")
        tokenized = await state.client.call(call)
        return json_response({"input_tokens": len(tokenized.token_ids)})

    return router


async def _events(prepared: PreparedChat, state: ServerState) -> AsyncGenerator[Event, None]:
    fields, recorder = prepared.fields, prepared.recorder
    made = MessageEvents(
        prepared.id,
        state.config.model_name,
        fields.include_reasoning is not False,
        bool(fields.return_times),
    )
    async with aclosing(state.generate(prepared.requests, prepared.constraint_field)) as chunks:
        async for _, chunk in chunks:
            extras: dict[str, Any] = {}
            calls = [call_delta(call, "toolu") for call in chunk.tool_calls]
            if recorder is not None:
                recorder.add(chunk.text, chunk.reasoning, calls)
                if chunk.finish_reason is not None:
                    extras["kept"] = recorder.end(chunk.finish_reason)
            logprobs = await chat_entries(chunk.logprobs)
            for one in made.of(chunk, calls, logprobs, extras):
                yield one


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for one in events:
            yield event(one, one["type"])


async def _whole(events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    async with aclosing(events):
        return whole_message([one async for one in events])
