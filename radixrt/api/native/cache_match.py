"""``/v1/cache/match``: the number of tokens that the cache holds now of each of several prompts.
Nothing is computed."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.http.body import to_struct
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.native.cache import WarmRequest, warm_target
from radixrt.api.requests.prompts import token_prompt
from radixrt.api.requests.protocol import RequestBody
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.messages.calls import MatchCall
from radixrt.messages.requests import Prompt, TextPrompt, split_salt

MAX_MATCHES = 256
"""Prompts or orders of one request."""


class MatchRequest(RequestBody, kw_only=True):
    """Prompts, or parts of a text and orders in which they may stand."""

    model: str | None = None
    prompts: list[str | list[Any] | dict[str, Any]] | None = None
    """Each a text, token ids, or an object with messages, as the body of ``/v1/cache/warm``."""
    parts: list[str] | None = None
    orders: list[list[int]] | None = None
    """Each the indices of the parts of one text."""
    add_special_tokens: bool | None = None
    """Whether texts get special tokens."""


def match_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/cache/match", MatchRequest)
    async def match(request: Request, fields: MatchRequest) -> Response:
        salt, tenant = fields.cache_salt or "", caller_of(request).tenant
        if state.keys.count > 1 and not split_salt(salt)[1]:
            raise RequestError(
                "With several API keys on the server, a request needs a cache_salt here: without one it could tell what others "
                "have asked.",
                status=403,
                param="cache_salt",
            )
        prompts = _prompts(fields, state, request)
        call = MatchCall(prompts=prompts, cache_salt=salt, tenant=tenant)
        matches = await while_connected(request, state.client.call(call))
        return json_response(
            {"matches": msgspec.to_builtins(matches), "page_size": state.info.page_size}
        )

    return router


def _prompts(fields: MatchRequest, state: ServerState, request: Request) -> list[Prompt]:
    """Raises:
    RequestError: neither prompts nor parts with orders are given, or too many; or one is not well
        formed.
    """
    if (fields.prompts is None) == (fields.parts is None) or (fields.parts is None) != (
        fields.orders is None
    ):
        raise RequestError("Give prompts, or parts and orders.", param="prompts")
    given = fields.prompts if fields.orders is None else fields.orders
    name = "prompts" if fields.orders is None else "orders"
    if not given or len(given) > MAX_MATCHES:
        raise RequestError(
            f"{name} must have from 1 to {MAX_MATCHES} entries, not {len(given or ())}.",
            param=name,
        )
    special = fields.add_special_tokens is not False
    if fields.parts is not None and fields.orders is not None:
        return [
            TextPrompt(_ordered(fields.parts, order, f"orders[{i}]"), special)
            for i, order in enumerate(fields.orders)
        ]
    return [
        _prompt(one, f"prompts[{i}]", special, state, request)
        for i, one in enumerate(fields.prompts or ())
    ]


def _prompt(
    given: str | list[Any] | dict[str, Any],
    where: str,
    special: bool,
    state: ServerState,
    request: Request,
) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(given, special)
    if isinstance(given, list):
        return token_prompt(given, state.info.vocab_size, where)
    return warm_target(to_struct(given, WarmRequest), state, request)


def _ordered(parts: list[str], order: list[int], where: str) -> str:
    if not all(0 <= index < len(parts) for index in order):
        raise RequestError(f"{where} must hold indices from 0 to {len(parts) - 1}.", param=where)
    return "".join(parts[index] for index in order)
