"""Loads and unloads LoRA adapters while the server runs: the paths and fields of vLLM and SGLang."""

from pathlib import Path
from typing import Any

from fastapi import Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.requests.protocol import RequestBody
from radixrt.api.state import Context
from radixrt.base.errors import wrong
from radixrt.messages.calls import LoadAdapterCall, UnloadAdapterCall

routes = Endpoints()

MAX_NAME = 256
"""Characters of an adapter's name, which stands in lists, logs and labels of metrics."""


class LoadRequest(RequestBody, kw_only=True):
    lora_name: str
    lora_path: str
    """A folder on the server's machine."""
    load_inplace: bool | None = None
    """Replace an adapter of the same name."""


class UnloadRequest(RequestBody, kw_only=True):
    lora_name: str


def _refuse_nothing(body: dict[str, Any]) -> None:
    """``lora_path`` is a field of other endpoints too, which do not support it."""


@routes.takes("/load_lora_adapter", LoadRequest, _refuse_nothing)
@routes.takes("/v1/load_lora_adapter", LoadRequest, _refuse_nothing)
async def load_lora_adapter(fields: LoadRequest, context: Context) -> Response:
    config = context.state.config
    if not fields.lora_name or fields.lora_name in config.model_names:
        raise wrong("lora_name", "must be a name of its own")
    if len(fields.lora_name) > MAX_NAME or not fields.lora_name.isprintable():
        raise wrong("lora_name", f"must have at most {MAX_NAME} characters, all of them printable")
    if not fields.lora_path:
        raise wrong("lora_path", "must be a folder")
    call = LoadAdapterCall(
        name=fields.lora_name,
        path=str(Path(fields.lora_path).expanduser()),
        replaces=bool(fields.load_inplace),
    )
    info = await context.call(call)
    return json_response({"name": info.name, "digest": info.digest, "parent": config.model_name})


@routes.takes("/unload_lora_adapter", UnloadRequest)
@routes.takes("/v1/unload_lora_adapter", UnloadRequest)
async def unload_lora_adapter(fields: UnloadRequest, context: Context) -> Response:
    info = await context.call(UnloadAdapterCall(name=fields.lora_name))
    return json_response({"name": info.name, "digest": info.digest})
