"""``/v1/cache/…``: warms, pins, releases, matches and shows KV in the cache."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query, Response
from msgspec.structs import replace

from radixrt.api.http.endpoints import Endpoints, to_struct
from radixrt.api.http.events import json_response
from radixrt.api.requests.options import request_id, request_options
from radixrt.api.requests.prompts import one_prompt, token_prompt
from radixrt.api.requests.protocol import PromptRequest, RequestBody
from radixrt.api.state import Context, Here
from radixrt.base.errors import RequestError, wrong
from radixrt.client.warming import DEFAULT_PIN_S, Pinned
from radixrt.client.warming import pin as pin_prompt
from radixrt.client.warming import warm as warm_prompt
from radixrt.kv.cache_hint import LONGEST_SESSION, check_session
from radixrt.kv.reading import CacheStats
from radixrt.messages.cache_tree import CacheNode
from radixrt.messages.calls import (
    CacheNodeCall,
    CacheTreeCall,
    ExplainCacheCall,
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
)

MAX_TREE_LEVELS = 16
MAX_TREE_CHILDREN = 100
MAX_NODE_ID = (1 << 63) - 1
MAX_SESSIONS = 1024
"""Most sessions that one request may release."""
MAX_MATCHES = 256
"""Prompts or orders of one request."""

NodeId = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE_ID)]
"""The id of a node of ``/v1/cache/tree``."""


class WarmRequest(PromptRequest, kw_only=True):
    """A prompt in one of three forms: messages, prompt or token_ids. The template adds no
    generation prompt unless asked to."""

    priority: int | Literal["idle"] | None = None  # type: ignore[assignment]
    """"idle": it is computed while no other request waits or runs."""
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


routes = Endpoints()


@routes.takes("/v1/cache/warm", WarmRequest)
async def warm(fields: WarmRequest, context: Context) -> Response:
    warming = warm_prompt(context.state.run, *_target(fields, context))
    return json_response(msgspec.to_builtins(await context.wait(warming)))


@routes.takes("/v1/cache/pin", PinRequest)
async def pin(fields: PinRequest, context: Context) -> Response:
    ttl_s = DEFAULT_PIN_S if fields.ttl_s is None else fields.ttl_s
    if fields.priority == "idle":
        raise RequestError("A pin is computed at once; leave priority out.", param="priority")
    if fields.node is None:
        state, target = context.state, _target(fields, context)
        pinning = pin_prompt(state.client, state.run, *target, ttl_s=ttl_s)
        return json_response(msgspec.to_builtins(await context.wait(pinning)))
    if given := _forms_given(fields):
        raise RequestError(f"Give node or {given[0]}, not both.", param="node")
    return json_response(msgspec.to_builtins(await _pin_node(fields.node, ttl_s, context)))


@routes.takes("/v1/cache/release", ReleaseRequest)
async def release(fields: ReleaseRequest, context: Context) -> Response:
    _check_release(fields)
    caller, root = context.caller, context.root(fields.cache_salt)
    if fields.lease is not None:
        calls = [ReleaseCacheCall(lease=fields.lease, tenant=caller.tenant)]
    elif fields.node is not None:  # all leases that hold it
        leases = (await _node(fields.node, context)).leases
        calls = [
            ReleaseCacheCall(lease=one.lease, tenant=Tenant(name=one.tenant)) for one in leases
        ]
    else:
        names = [fields.session] if fields.session is not None else fields.sessions or []
        calls = [ReleaseCacheCall(session=caller.session(name), root=root) for name in names]
    released = sum(await asyncio.gather(*map(context.call, calls)))
    return json_response({"released_tokens": released})


@routes.takes("/v1/cache/match", MatchRequest)
async def match(fields: MatchRequest, context: Context) -> Response:
    """The number of tokens that the cache holds of each prompt. Nothing is computed."""
    root = context.root(fields.cache_salt)
    if context.state.keys.count > 1 and not root.salt:
        raise RequestError(
            "With several API keys on the server, a request needs a cache_salt here: without one it could tell what others "
            "have asked.",
            status=403,
            param="cache_salt",
        )
    prompts = _prompts(fields, context)
    call = MatchCall(prompts=prompts, root=root, tenant=context.tenant)
    matches = msgspec.to_builtins(await context.wait(context.call(call)))
    return json_response({"matches": matches, "page_size": context.state.info.page_size})


@routes.get("/v1/cache/stats")
async def stats(context: Here) -> Response:
    if context.tenant.name and not context.caller.is_admin:
        return json_response(
            msgspec.to_builtins(await context.call(TenantStatsCall(context.tenant)))
        )
    stats = await context.call(StatsCall())
    cache = CacheStats.from_scheduler(stats, context.state.info.page_size)
    return json_response(msgspec.to_builtins(cache))


@routes.get("/v1/cache/explain/{request_id}")
async def explain(context: Here, request_id: str) -> Response:
    caller = context.caller
    call = ExplainCacheCall(
        request_id=request_id, tenant=caller.tenant, with_texts=caller.sees_own_texts
    )
    (explanation,) = await context.call(call)
    return json_response(msgspec.to_builtins(explanation))


@routes.get("/v1/cache/explain")
async def explain_session(
    context: Here, session: str = Query(min_length=1, max_length=LONGEST_SESSION)
) -> Response:
    caller = context.caller
    call = ExplainCacheCall(
        session=caller.session(session), tenant=caller.tenant, with_texts=caller.sees_own_texts
    )
    return json_response({"requests": msgspec.to_builtins(await context.call(call))})


@routes.get("/v1/cache/tree")
async def tree(
    context: Here,
    depth: int = Query(3, ge=1, le=MAX_TREE_LEVELS),
    children: int = Query(16, ge=1, le=MAX_TREE_CHILDREN),
) -> Response:
    return json_response(await tree_for(context, depth=depth, children=children))


@routes.get("/v1/cache/tree/{node}")
async def tree_node(context: Here, node: int = Path(ge=0, le=MAX_NODE_ID)) -> Response:
    found = await _node(node, context)
    shown = msgspec.to_builtins(found)
    del shown["root"], shown["token_ids"]
    shown["prefix_tokens"] = num_ids(found.token_ids)
    for lease in shown["leases"]:
        del lease["lease"]
    return json_response(shown)


async def tree_for(context: Context, **view: Any) -> dict[str, Any]:
    """The part of the tree that the caller may see.

    Args:
        view: fields of :class:`radixrt.messages.calls.CacheTreeCall`.
    """
    caller = context.caller
    namespace = None if caller.is_admin else caller.tenant.cache_namespace
    call = CacheTreeCall(namespace=namespace, with_texts=caller.is_admin, **view)
    return await context.call(call)


async def _node(node: int, context: Context) -> CacheNode:
    """Raises RequestError if the node has left the tree, or the caller is not an admin."""
    context.caller.check_admin("A node of the radix tree")
    return await context.call(CacheNodeCall(node))


async def _pin_node(node: int, ttl_s: float, context: Context) -> Pinned:
    """Take a lease on a node's prefix, which is in the tree."""
    found = await _node(node, context)
    num_tokens = num_ids(found.token_ids)
    call = PinCall(
        prompt=TokenPrompt(found.token_ids),
        root=found.root,
        ttl_s=ttl_s,
        tenant=context.tenant,
    )
    lease = await context.call(call)
    return Pinned(
        **msgspec.structs.asdict(lease),
        prompt_tokens=num_tokens,
        cached_tokens=num_tokens,
        cache_write_tokens=0,
    )


def _target(fields: WarmRequest, context: Context) -> tuple[str, Prompt, RequestOptions]:
    """The id, the prompt and the options of a request to warm."""
    name = context.name(request_id("warm", fields.rid))
    is_idle = fields.priority == "idle"
    options = request_options(replace(fields, priority=0) if is_idle else fields, context)
    return name, _warm_prompt(fields, context), replace(options, idle="expected" if is_idle else "")


def _forms_given(fields: WarmRequest) -> list[str]:
    """The forms in which the request has a prompt."""
    forms = ("messages", "prompt", "token_ids")
    return [name for name in forms if getattr(fields, name) is not None]


def _warm_prompt(fields: WarmRequest, context: Context) -> Prompt:
    """The prompt, in the one of its forms that the request must have."""
    given = _forms_given(fields)
    if len(given) != 1:
        raise RequestError(
            f"Give one of messages, prompt and token_ids, not {' and '.join(given) or 'none'}.",
            param=given[-1] if given else "messages",
        )
    if fields.token_ids is not None:
        return token_prompt(fields.token_ids, context.state.info.vocab_size, "token_ids")
    return one_prompt(fields, context, opens_turn=False)


def _check_release(fields: ReleaseRequest) -> None:
    """Raises RequestError if it does not name one thing to release."""
    if [fields.lease, fields.node, fields.session, fields.sessions].count(None) != 3:
        raise RequestError(
            "Give the lease to end, or the session that has ended, or the list of sessions, or the node to unpin: one of them.",
            param="lease",
        )
    if fields.lease == "":
        raise wrong("lease", "is empty; it must be the one that /v1/cache/pin returned")
    if fields.session is not None:
        check_session(fields.session, "session")
    sessions = fields.sessions or []
    if len(sessions) > MAX_SESSIONS:
        raise wrong("sessions", f"may name {MAX_SESSIONS} of them at a time, not {len(sessions)}")
    for index, session in enumerate(sessions):
        check_session(session, f"sessions[{index}]")


def _prompts(fields: MatchRequest, context: Context) -> list[Prompt]:
    """Raises RequestError if neither prompts nor parts with orders are given, or too many; or one
    is not well formed."""
    if (fields.prompts is None) == (fields.parts is None) or (fields.parts is None) != (
        fields.orders is None
    ):
        raise RequestError("Give prompts, or parts and orders.", param="prompts")
    given: list[Any] | None = fields.prompts if fields.orders is None else fields.orders
    name = "prompts" if fields.orders is None else "orders"
    if not given or len(given) > MAX_MATCHES:
        raise wrong(name, f"must have from 1 to {MAX_MATCHES} entries, not {len(given or ())}")
    special = fields.add_special_tokens is not False
    if fields.parts is not None and fields.orders is not None:
        ordered = [
            _ordered(fields.parts, one, f"orders[{i}]") for i, one in enumerate(fields.orders)
        ]
        return [TextPrompt(text, special) for text in ordered]
    return [_prompt(one, f"prompts[{i}]", special, context) for i, one in enumerate(given)]


def _prompt(
    given: str | list[Any] | dict[str, Any], where: str, special: bool, context: Context
) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(given, special)
    if isinstance(given, list):
        return token_prompt(given, context.state.info.vocab_size, where)
    return _warm_prompt(to_struct(given, WarmRequest), context)


def _ordered(parts: list[str], order: list[int], where: str) -> str:
    if not all(0 <= index < len(parts) for index in order):
        raise wrong(where, f"must hold indices from 0 to {len(parts) - 1}")
    return "".join(parts[index] for index in order)
