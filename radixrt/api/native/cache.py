"""``/v1/cache/…``: warms, pins, releases, matches and shows KV in the cache."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from radixrt.api.http.endpoints import Endpoints, to_struct
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.keys import Caller, caller_of
from radixrt.api.requests.options import request_id, request_options
from radixrt.api.requests.prompts import one_prompt, token_prompt
from radixrt.api.requests.protocol import PromptRequest, RequestBody
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.client.warming import DEFAULT_PIN_S, Pinned
from radixrt.client.warming import pin as pin_prompt
from radixrt.client.warming import warm as warm_prompt
from radixrt.kv.cache_hint import LONGEST_SESSION, check_session
from radixrt.kv.cache_stats import CacheStats
from radixrt.messages.cache_tree import CacheNode
from radixrt.messages.calls import (
    CacheNodeCall,
    CacheTreeCall,
    ExplainCacheCall,
    ExplainSessionCall,
    MatchCall,
    PinCall,
    ReleaseCacheCall,
    StatsCall,
    TenantStatsCall,
)
from radixrt.messages.ids import num_ids
from radixrt.messages.requests import (
    Prompt,
    RequestOptions,
    Tenant,
    TextPrompt,
    TokenPrompt,
    split_salt,
)

MAX_TREE_LEVELS = 16
MAX_TREE_CHILDREN = 100
MAX_NODE_ID = (1 << 63) - 1
_FORMS = ("messages", "prompt", "token_ids")
"""The forms of a prompt."""

MAX_SESSIONS = 1024
"""Most sessions that one request may release."""


NodeId = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE_ID)]
"""The id of a node of ``/v1/cache/tree``."""


class WarmRequest(PromptRequest, kw_only=True):
    """A prompt in one of three forms: messages, prompt or token_ids. The template adds no
    generation prompt unless asked to."""

    token_ids: list[Any] | None = None


class PinRequest(WarmRequest, kw_only=True):
    ttl_s: float | None = None
    """Seconds that the lease lasts."""
    node: NodeId | None = None
    """A node of ``/v1/cache/tree`` in place of a prompt; its prefix is pinned as it is."""


class ReleaseRequest(RequestBody, kw_only=True):
    """Names a lease, a session, or many sessions; the cache salt is that of the sessions'
    requests."""

    model: str | None = None
    lease: str | None = None
    node: NodeId | None = None
    """A node of ``/v1/cache/tree``, for all leases that hold it."""
    session: str | None = None
    sessions: list[str] | None = None


def cache_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/cache/warm", WarmRequest)
    async def warm(request: Request, fields: WarmRequest) -> Response:
        warming = warm_prompt(state.run, *_target(fields, state, request))
        return json_response(msgspec.to_builtins(await while_connected(request, warming)))

    @router.takes("/v1/cache/pin", PinRequest)
    async def pin(request: Request, fields: PinRequest) -> Response:
        ttl_s = DEFAULT_PIN_S if fields.ttl_s is None else fields.ttl_s
        if fields.node is not None:
            _check_alone(fields, "node")
            pinned = await _pin_node(fields.node, ttl_s, state, request)
            return json_response(msgspec.to_builtins(pinned))
        pinning = pin_prompt(state.client, state.run, *_target(fields, state, request), ttl_s=ttl_s)
        return json_response(msgspec.to_builtins(await while_connected(request, pinning)))

    @router.takes("/v1/cache/release", ReleaseRequest)
    async def release(request: Request, fields: ReleaseRequest) -> Response:
        _check_release(fields)
        caller = caller_of(request)
        if fields.lease is not None:
            call = ReleaseCacheCall(lease=fields.lease, tenant=caller.tenant)
            released = await state.client.call(call)
        elif fields.node is not None:
            released = await _release_node(fields.node, state, request)
        else:
            salt = fields.cache_salt or ""
            names = [fields.session] if fields.session is not None else fields.sessions or []
            each = [
                state.client.call(ReleaseCacheCall(session=caller.session(name), cache_salt=salt))
                for name in names
            ]
            released = sum(await asyncio.gather(*each))
        return json_response({"released_tokens": released})

    @router.get("/v1/cache/stats")
    async def stats(request: Request) -> Response:
        caller = caller_of(request)
        if caller.tenant.name and not caller.is_admin:
            own = await state.client.call(TenantStatsCall(caller.tenant))
            return json_response(msgspec.to_builtins(own))
        stats = CacheStats.from_scheduler(
            await state.client.call(StatsCall()), state.info.page_size
        )
        return json_response(msgspec.to_builtins(stats))

    @router.get("/v1/cache/explain/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        caller = caller_of(request)
        call = ExplainCacheCall(request_id, caller.tenant, caller.sees_own_texts)
        explanation = await state.client.call(call)
        return json_response(msgspec.to_builtins(explanation))

    @router.get("/v1/cache/explain")
    async def explain_session(
        request: Request, session: str = Query(min_length=1, max_length=LONGEST_SESSION)
    ) -> Response:
        caller = caller_of(request)
        call = ExplainSessionCall(caller.session(session), caller.tenant, caller.sees_own_texts)
        return json_response({"requests": msgspec.to_builtins(await state.client.call(call))})

    @router.get("/v1/cache/tree")
    async def tree(
        request: Request,
        depth: int = Query(3, ge=1, le=MAX_TREE_LEVELS),
        children: int = Query(16, ge=1, le=MAX_TREE_CHILDREN),
    ) -> Response:
        return json_response(
            await tree_for(caller_of(request), state, depth=depth, children=children)
        )

    @router.get("/v1/cache/tree/{node}")
    async def tree_node(request: Request, node: int = Path(ge=0, le=MAX_NODE_ID)) -> Response:
        found = await _node(node, state, request)
        shown = msgspec.to_builtins(found)
        del shown["cache_salt"], shown["token_ids"]
        shown["prefix_tokens"] = num_ids(found.token_ids)
        for lease in shown["leases"]:
            del lease["lease"]
        return json_response(shown)

    return router


async def tree_for(caller: Caller, state: ServerState, **view: Any) -> dict[str, Any]:
    """The part of the tree that a caller may see.

    Args:
        view: fields of :class:`radixrt.messages.calls.CacheTreeCall`.
    """
    namespace = None if caller.is_admin else caller.tenant.cache_namespace
    call = CacheTreeCall(namespace=namespace, with_texts=caller.is_admin, **view)
    return await state.client.call(call)


async def _node(node: int, state: ServerState, request: Request) -> CacheNode:
    """Raises:
    RequestError: the node has left the tree, or the caller is not an admin.
    """
    caller_of(request).check_admin("A node of the radix tree")
    return await state.client.call(CacheNodeCall(node))


async def _pin_node(node: int, ttl_s: float, state: ServerState, request: Request) -> Pinned:
    """Take a lease on a node's prefix, which is in the tree."""
    found = await _node(node, state, request)
    num_tokens = num_ids(found.token_ids)
    call = PinCall(
        prompt=TokenPrompt(found.token_ids),
        cache_salt=found.cache_salt,
        ttl_s=ttl_s,
        tenant=caller_of(request).tenant,
    )
    lease = await state.client.call(call)
    return Pinned(
        **msgspec.structs.asdict(lease),
        prompt_tokens=num_tokens,
        cached_tokens=num_tokens,
        cache_write_tokens=0,
    )


async def _release_node(node: int, state: ServerState, request: Request) -> int:
    """End all leases that hold a node; returns their tokens."""
    found = await _node(node, state, request)
    each = [
        state.client.call(ReleaseCacheCall(lease=lease.lease, tenant=Tenant(name=lease.tenant)))
        for lease in found.leases
    ]
    return sum(await asyncio.gather(*each))


def _target(
    fields: WarmRequest, state: ServerState, request: Request
) -> tuple[str, Prompt, RequestOptions]:
    """The id, the prompt and the options of a request to warm."""
    name = request.state.request_id = request_id("warm", fields.rid)
    options = request_options(fields, state.config, caller_of(request))
    return name, warm_target(fields, state, request), options


def warm_target(fields: WarmRequest, state: ServerState, request: Request) -> Prompt:
    """The prompt in one of its forms.

    Raises:
        RequestError: there is not exactly one prompt, or it is not well formed.
    """
    given = [name for name in _FORMS if getattr(fields, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"Give one of messages, prompt and token_ids, not {' and '.join(given) or 'none'}.",
            param=given[-1] if given else "messages",
        )
    if fields.token_ids is not None:
        return token_prompt(fields.token_ids, state.info.vocab_size, "token_ids")
    return one_prompt(fields, state, request, opens_turn=False)


def _check_alone(fields: WarmRequest, name: str) -> None:
    """Raises:
    RequestError: a prompt is given as well.
    """
    given = [form for form in _FORMS if getattr(fields, form) is not None]
    if given:
        raise RequestError(f"Give {name} or {given[0]}, not both.", param=name)


def _check_release(fields: ReleaseRequest) -> None:
    """Raises:
    RequestError: it does not name one thing to release.
    """
    if [fields.lease, fields.node, fields.session, fields.sessions].count(None) != 3:
        raise RequestError(
            "Give the lease to end, or the session that has ended, or the list of sessions, or the node to unpin: one of them.",
            param="lease",
        )
    if fields.lease == "":
        raise RequestError(
            "lease is empty; it must be the one that /v1/cache/pin returned.", param="lease"
        )
    if fields.session is not None:
        check_session(fields.session, "session")
    sessions = fields.sessions or []
    if len(sessions) > MAX_SESSIONS:
        raise RequestError(
            f"sessions may name {MAX_SESSIONS} of them at a time, not {len(sessions)}.",
            param="sessions",
        )
    for index, session in enumerate(sessions):
        check_session(session, f"sessions[{index}]")


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
