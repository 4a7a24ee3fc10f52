"""``/v1/live``: a stream of readings of the server, for the web page and ``radixrt top``."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from radixrt.api.http.events import EventStream, event, json_response, while_connected
from radixrt.api.http.keys import Caller, caller_of
from radixrt.api.native.cache import MAX_NODE_ID, MAX_TREE_CHILDREN, MAX_TREE_LEVELS, tree_for
from radixrt.api.state import ServerState
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


class _Streams:
    """Bounds the streams at a time."""

    def __init__(self) -> None:
        self._open = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises:
        RequestError: there are enough.
        """
        if self._open >= MAX_STREAMS:
            raise RequestError(
                f"{MAX_STREAMS} clients watch this server already; close a page, or retry.",
                status=503,
                retry_after_s=10,
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


def live_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    streams = {is_admin: _Streams() for is_admin in (True, False)}
    """Users that watch keep no admin out."""

    @router.get("/v1/live")
    async def live(
        request: Request,
        stream: bool = False,
        interval: float = Query(1.0, ge=1.0, le=60.0),
        depth: int = Query(MAX_TREE_LEVELS, ge=1, le=MAX_TREE_LEVELS),
        children: int = Query(MAX_TREE_CHILDREN, ge=1, le=MAX_TREE_CHILDREN),
        nodes: int = Query(600, ge=1, le=2000),
        below: int | None = Query(None, ge=0, le=MAX_NODE_ID),
    ) -> Response:
        caller = caller_of(request)
        view = {"depth": depth, "children": children, "most": nodes, "below": below}
        if not stream:
            return json_response(await while_connected(request, _reading(state, caller, view)))
        return EventStream(_readings(state, caller, view, interval, streams[caller.is_admin]))

    return router


async def _readings(
    state: ServerState, caller: Caller, view: dict[str, Any], interval_s: float, streams: _Streams
) -> AsyncGenerator[bytes, None]:
    begin = time.monotonic()
    with streams.one_more():
        while not state.is_draining and time.monotonic() < begin + MAX_STREAM_S:
            next_at = time.monotonic() + interval_s
            yield event(await _reading(state, caller, view))
            while not state.is_draining and (left_s := next_at - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, LOOK_S))


async def _reading(state: ServerState, caller: Caller, view: dict[str, Any]) -> dict[str, Any]:
    """A :class:`radixrt.kv.reading.Reading` as builtins."""
    reading: dict[str, Any] = {
        "time_s": time.monotonic(),
        "model": state.config.model_name,
        "device": state.info.device,
        "kv_bytes_per_token": state.info.kv_bytes_per_token,
        "is_admin": caller.is_admin,
    }
    if caller.sees_engine(state.keys.are_declared):
        stats = await state.client.call(StatsCall())
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
        own = await state.client.call(TenantStatsCall(caller.tenant))
        reading["own"] = msgspec.to_builtins(own)
    return reading | {"tree": await tree_for(caller, state, **view)}
