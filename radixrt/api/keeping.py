"""``/v1/conversations``: how does a client have a prompt remembered before it asks anything?

What many requests will begin with then travels once: each of them names the id. See docs/api.md.
"""

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.continuation import Continuation, owner_of
from radixrt.api.conversation import to_template_messages
from radixrt.api.conversations import Items, Kind
from radixrt.api.events import json_response
from radixrt.api.protocol import ChatMessage, GenerationFields, refuse_unsupported
from radixrt.api.state import ServerState, new_id
from radixrt.errors import RequestError


class RememberedPrompt(msgspec.Struct, kw_only=True):
    """Messages or a text, behind a remembered conversation or alone."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    continue_from: str | None = None
    continue_after: int | None = None
    cache_salt: str | None = None


class KeepRequest(RememberedPrompt, kw_only=True):
    pass


def keeping_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/conversations")
    async def keep(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        fields = to_struct(body, KeepRequest)
        state.check_model(fields.model)
        continuation = continuation_of(fields, state, request)
        items: Items = fields.prompt or ""
        if fields.messages is not None:
            items = to_template_messages(fields.messages)
        name = new_id("conv")
        kept = state.conversations.keep(
            name, continuation.owner, items, continuation.source, continuation.taken
        )
        return json_response({"id": name, "kept": kept, "length": continuation.taken + len(items)})

    return router


def continuation_of(fields: RememberedPrompt, state: ServerState, request: Request) -> Continuation:
    """What a prompt goes on from.

    Raises:
        RequestError: there is not exactly one prompt, or there is no such conversation.
    """
    if (fields.messages is None) == (fields.prompt is None):
        raise RequestError("Give either messages or a prompt (a string).", param="messages")
    owner = owner_of(request, fields.cache_salt)
    kind: Kind = "text" if fields.messages is None else "messages"
    going_on = GenerationFields(
        continue_from=fields.continue_from, continue_after=fields.continue_after
    )
    return Continuation.of(going_on, kind, owner, state.conversations)
