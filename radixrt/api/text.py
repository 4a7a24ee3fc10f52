"""``/tokenize`` and ``/detokenize``: what the model's tokenizer makes of a text, and back."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.continuation import Continuation
from radixrt.api.endpoints import Endpoints
from radixrt.api.events import json_response
from radixrt.api.prompts import chat_prompt, token_prompt
from radixrt.api.protocol import ChatCompletionRequest
from radixrt.api.state import ServerState
from radixrt.errors import RequestError
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import Prompt, TextPrompt


class TokenizeText(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    add_special_tokens: bool | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool | None = None


def text_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)
    router.bodies["/tokenize"] = TokenizeText  # or a conversation

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_json(request)
        token_ids, prompt = await state.client.tokenize(_prompt(body, state, request))
        return json_response(
            {
                "tokens": token_ids,
                "count": len(token_ids),
                "max_model_len": state.info.context_length,
                "prompt": prompt,
            }
        )

    @router.takes("/detokenize", Detokenize)
    async def detokenize(request: Request, fields: Detokenize) -> Response:
        ids: list[int] = []
        if fields.tokens:
            packed = token_prompt(fields.tokens, state.info.vocab_size, "tokens").token_ids
            ids = unpack_ids(packed).tolist()
        text = await state.client.detokenize(ids, bool(fields.skip_special_tokens))
        return json_response({"prompt": text, "text": text})

    return router


def _prompt(body: dict[str, Any], state: ServerState, request: Request) -> Prompt:
    """A text, or a conversation as the chat endpoint takes it."""
    if "messages" in body:
        chat = to_struct(body, ChatCompletionRequest)
        state.check_model(chat.model)
        continuation = Continuation.of(chat, "messages", state.conversations, request)
        return chat_prompt(chat, chat.messages, continuation.messages)
    fields = to_struct(body, TokenizeText)
    state.check_model(fields.model)
    text = fields.prompt if fields.prompt is not None else fields.text
    if text is None:
        raise RequestError("Give a prompt (a string), or messages.", param="prompt")
    return TextPrompt(text, fields.add_special_tokens is not False)
