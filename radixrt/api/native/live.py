"""``/v1/live``: a stream of readings of the server, for the web page and ``radixrt top``."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Response

from radixrt.api.http.events import EventStream, event, json_response
from radixrt.api.native.cache import MAX_NODE_ID, MAX_TREE_CHILDREN, MAX_TREE_LEVELS, tree_for
from radixrt.api.state import Context, Here
from radixrt.base.errors import RequestError
from radixrt.kv.reading import CacheStats, EngineReading
from radixrt.messages.calls import StatsCall, TenantStatsCall

MAX_STREAMS = 16
"""Most streams at a time of admins, and as many of others. A reading of a large tree takes some
milliseconds of the scheduler."""

MAX_STREAM_S = 600
"""Then a stream ends, so that a key that has been removed sees no more; clients connect again."""

LOOK_S = 0.5
"""Between two looks whether the server shuts down."""


routes = APIRouter()


@routes.get("/v1/live")
async def live(
    context: Here,
    stream: bool = False,
    interval: float = Query(1.0, ge=1.0, le=60.0),
    depth: int = Query(MAX_TREE_LEVELS, ge=1, le=MAX_TREE_LEVELS),
    children: int = Query(MAX_TREE_CHILDREN, ge=1, le=MAX_TREE_CHILDREN),
    nodes: int = Query(600, ge=1, le=2000),
    below: int | None = Query(None, ge=0, le=MAX_NODE_ID),
) -> Response:
    view = {"depth": depth, "children": children, "most": nodes, "below": below}
    if stream:
        return EventStream(_readings(context, view, interval))
    return json_response(await context.wait(_reading(context, view)))


async def _readings(
    context: Context, view: dict[str, Any], interval_s: float
) -> AsyncGenerator[bytes, None]:
    begin, state = time.monotonic(), context.state
    open_streams, is_admin = state.live_streams, context.caller.is_admin
    if open_streams[is_admin] >= MAX_STREAMS:
        raise RequestError(
            f"{MAX_STREAMS} clients watch this server already; close a page, or retry.",
            status=503,
            retry_after_s=10,
        )
    open_streams[is_admin] += 1
    try:
        while not state.is_draining and time.monotonic() < begin + MAX_STREAM_S:
            next_at = time.monotonic() + interval_s
            yield event(await _reading(context, view))
            while not state.is_draining and (left_s := next_at - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, LOOK_S))
    finally:
        open_streams[is_admin] -= 1


async def _reading(context: Context, view: dict[str, Any]) -> dict[str, Any]:
    """A :class:`radixrt.kv.reading.Reading` as builtins."""
    state, caller = context.state, context.caller
    reading: dict[str, Any] = {
        "time_s": time.monotonic(),
        "model": state.config.model_name,
        "device": state.info.device,
        "kv_bytes_per_token": state.info.kv_bytes_per_token,
        "is_admin": caller.is_admin,
    }
    if caller.sees_engine(state.keys.are_declared):
        stats = await context.call(StatsCall())
        cache = CacheStats.from_scheduler(stats, state.info.page_size)
        state.metrics.recent.take(stats)
        engine = EngineReading(
            stats=stats,
            requests=state.metrics.requests,
            cache=cache,
            pool=cache.tokens.parts,
            rates=state.metrics.recent.rates(),
        )
        reading["engine"] = msgspec.to_builtins(engine)
    if caller.tenant.name:
        own = await context.call(TenantStatsCall(caller.tenant))
        reading["own"] = msgspec.to_builtins(own)
    return reading | {"tree": await tree_for(context, **view)}
