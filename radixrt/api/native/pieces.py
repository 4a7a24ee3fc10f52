"""``/v1/prompts``: prompts that arrive in pieces, computed ahead while the rest arrives."""

from typing import Any, ClassVar

from fastapi import Response

from radixrt.api.conversations.continuation import access_key_of
from radixrt.api.conversations.open_prompts import OpenPrompt
from radixrt.api.http.endpoints import Endpoints, read_json, to_struct
from radixrt.api.http.events import json_response
from radixrt.api.http.middleware import new_id
from radixrt.api.openai.chat import chat_completions
from radixrt.api.openai.completions import completions
from radixrt.api.requests.messages import to_template_messages
from radixrt.api.requests.options import request_options
from radixrt.api.requests.prompts import one_prompt
from radixrt.api.requests.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    PromptRequest,
    RequestBody,
    refuse_unsupported,
)
from radixrt.api.state import Context, Here
from radixrt.base.errors import RequestError
from radixrt.messages.requests import ChatPrompt


class PieceRequest(RequestBody, kw_only=True):
    """One more piece: messages, or text of the last message or of the text."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    text: str | None = None


class CommitRequest(RequestBody):
    """The fields of a chat or a completion, which are read as such."""

    is_passed_on: ClassVar[bool] = True


routes = Endpoints()


@routes.takes("/v1/prompts", PromptRequest)
async def open_prompt(fields: PromptRequest, context: Context) -> Response:
    """Open a prompt with its first piece."""
    access_key = access_key_of(context.caller, fields.cache_salt)
    begin = one_prompt(fields, context)
    options = request_options(fields, context)
    opened = context.state.prompts.open(new_id("prompt"), access_key, begin, options)
    return json_response(_described(opened))


@routes.takes("/v1/prompts/{prompt_id}", PieceRequest)
async def add_piece(fields: PieceRequest, context: Context) -> Response:
    if (fields.messages is None) == (fields.text is None):
        raise RequestError("Give either messages or text.", param="text")
    piece: Any = fields.text if fields.messages is None else to_template_messages(fields.messages)
    prompt_id = context.request.path_params["prompt_id"]
    access_key = access_key_of(context.caller, fields.cache_salt)
    return json_response(_described(context.state.prompts.add(prompt_id, access_key, piece)))


@routes.takes("/v1/prompts/{prompt_id}/commit", CommitRequest)
async def commit(fields: CommitRequest, context: Context) -> Response:
    """Answer a prompt, as chat or completions do, and end it. The body has their other fields."""
    prompt_id = context.request.path_params["prompt_id"]
    access_key = access_key_of(context.caller, fields.cache_salt)
    prompts = context.state.prompts
    begin = prompts.find(prompt_id, access_key).begin
    body = await read_json(context.request, context.state.json_bounds)
    refuse_unsupported(body)
    body["continue_from"] = prompt_id
    if isinstance(begin, ChatPrompt):
        settings: dict[str, Any] = {
            "tools": begin.tools,
            "chat_template_kwargs": begin.template_kwargs,
            "messages": [],
        }
        chat = to_struct(settings | body, ChatCompletionRequest)
        response = await chat_completions(chat, context)
    else:
        settings = {"add_special_tokens": begin.add_special_tokens, "prompt": ""}
        text = to_struct(settings | body, CompletionRequest)
        response = await completions(text, context)
    if response.status_code < 400:
        prompts.close(prompt_id, access_key, give_back=False)
    return response


@routes.delete("/v1/prompts/{prompt_id}")
async def delete(context: Here, prompt_id: str, cache_salt: str | None = None) -> Response:
    """Abandon a prompt; its KV is evicted first."""
    access_key = access_key_of(context.caller, cache_salt)
    context.state.prompts.close(prompt_id, access_key, give_back=True)
    return json_response({"id": prompt_id, "deleted": True})


def _described(opened: OpenPrompt) -> dict[str, Any]:
    return {"id": opened.id, "object": "prompt", "pieces": opened.pieces}
