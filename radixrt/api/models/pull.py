"""``/api/pull``: downloads a model of the hub, which the server then serves, too."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import orjson
from fastapi import Request, Response

from radixrt.api.http.body import read_json
from radixrt.api.http.events import LineStream, json_line, json_response
from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.models.models import Models
from radixrt.api.ollama.protocol import TAG
from radixrt.base.child import ServedModel
from radixrt.base.errors import RequestError

_LIMIT = 1 << 20
"""Longest line, in bytes: the last one has all settings."""


async def pull(request: Request, models: Models, run_dir: Path) -> Response:
    """
    Args:
        run_dir: has the settings of the server.
    """
    body = await read_json(request, JsonBounds())
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise RequestError("model must name a model of the hub, as USER/NAME.", param="model")
    objects = _objects(name.removesuffix(TAG), models, run_dir)
    if body.get("stream") is False:
        async with aclosing(objects):
            *_, last = [one async for one in objects]
        return json_response(last)
    return LineStream(
        (json_line(one) async for one in objects), lambda: {"status": f"pulling {name}"}
    )


async def _objects(
    name: str, models: Models, run_dir: Path
) -> AsyncGenerator[dict[str, Any], None]:
    """Raises:
    RequestError: it cannot be downloaded, or not be served.
    """
    yield {"status": "pulling manifest"}
    if not models.has(name):
        async with aclosing(_messages(name, run_dir)) as messages:
            async for message in messages:
                if "total" in message:
                    yield {"status": f"pulling {name}", "digest": name, **message}
                else:
                    models.add(msgspec.convert(message, ServedModel))
    yield {"status": "success"}


async def _messages(name: str, run_dir: Path) -> AsyncGenerator[dict[str, Any], None]:
    """What the process says that downloads, until it ends; it ends with its client's request."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "radixrt.supervisor.pull", str(run_dir), name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=_LIMIT,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            message: dict[str, Any] = orjson.loads(line)
            if "error" in message:
                raise RequestError(message["error"])
            yield message
        if await process.wait():
            raise RequestError(
                "The download has failed; the server's log has the reason.", status=500
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
