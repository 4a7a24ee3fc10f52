"""``/v1/conversations``: how does a client have a prompt remembered before it asks anything?

What many requests will begin with then travels once: each of them names the id. See docs/api.md.
"""

from fastapi import APIRouter, Request, Response

from radixrt.api.conversations.continuation import Continuation
from radixrt.api.conversations.store import Items
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.http.request_ids import new_id
from radixrt.api.openai.protocol import KeepRequest
from radixrt.api.openai.template_messages import to_template_messages
from radixrt.api.state import ServerState


def keeping_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/conversations", KeepRequest)
    async def keep(request: Request, fields: KeepRequest) -> Response:
        continuation = Continuation.of_one_prompt(fields, state.conversations, request)
        items: Items = fields.prompt or ""
        if fields.messages is not None:
            items = to_template_messages(fields.messages)
        name = new_id("conv")
        kept = state.conversations.keep(
            name, continuation.owner, items, continuation.source, continuation.taken
        )
        return json_response({"id": name, "kept": kept, "length": continuation.taken + len(items)})

    return router
