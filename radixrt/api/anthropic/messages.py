"""``/v1/messages`` and ``/v1/messages/count_tokens``, and the form of their errors."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.answering import Formatter, respond
from radixrt.api.anthropic.events import Event, MessageEvents, whole_message
from radixrt.api.anthropic.protocol import (
    REFUSED,
    CountTokensRequest,
    MessagesRequest,
)
from radixrt.api.anthropic.translation import to_chat
from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import ErrorShape
from radixrt.api.http.events import event, json_response
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import chat_entries
from radixrt.api.openai.chat import PreparedChat, prepare_chat
from radixrt.api.requests.prompts import chat_prompt
from radixrt.api.requests.protocol import refuse_fields
from radixrt.api.requests.tools import call_delta
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.messages.answers import AnswerChunk
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
    router, refuse = Endpoints(state), partial(refuse_fields, names=REFUSED)

    @router.takes("/v1/messages", MessagesRequest, refuse)
    async def messages(request: Request, fields: MessagesRequest) -> Response:
        if fields.max_tokens is None:
            raise RequestError("max_tokens is missing.", param="max_tokens")
        chat = to_chat(fields)
        if state.config.reasoning_parser == "none" or chat.continue_final_message:
            chat.max_reasoning_tokens = fields.max_reasoning_tokens  # there is nothing to bound
        prepared = prepare_chat(chat, state, request, "msg")
        prepared.check_one_answer()
        return await respond(_Message(prepared, state), prepared, request, state)

    @router.takes("/v1/messages/count_tokens", CountTokensRequest, refuse)
    async def count_tokens(request: Request, fields: CountTokensRequest) -> Response:
        chat = to_chat(fields)
        continuation = Continuation.find(chat, "messages", state.conversations, request)
        prompt = chat_prompt(chat, chat.messages, continuation.messages)
        call = TokenizeCall(prompt, caller_of(request).tenant, fields.cache_salt or "")
        tokenized = await state.client.call(call)
        return json_response({"input_tokens": len(tokenized.token_ids)})

    return router


class _Message(Formatter):
    def __init__(self, prepared: PreparedChat, state: ServerState) -> None:
        super().__init__(prepared)
        self._prepared = prepared
        fields = prepared.fields
        self._events = MessageEvents(
            prepared.id,
            state.config.model_name,
            fields.include_reasoning is not False,
            bool(fields.return_times),
        )
        self._is_aborted = False

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[Event]:
        self._is_aborted = chunk.finish_reason == "abort"
        calls = [call_delta(call, "toolu") for call in chunk.tool_calls]
        kept = self._prepared.record(chunk, chunk.text, calls)
        return self._events.from_chunk(chunk, calls, await chat_entries(chunk.logprobs), kept)

    def encoded(self, part: Event) -> bytes:
        return event(part, part["type"])

    def whole(self, parts: list[Event]) -> dict[str, Any]:
        return whole_message(parts)

    def end(self) -> bytes:
        """Raises:
        RequestError: the answer was aborted; the API has no other word for it.
        """
        if self._is_aborted:
            raise RequestError("The request was aborted.", status=499, code="request_aborted")
        return super().end()
