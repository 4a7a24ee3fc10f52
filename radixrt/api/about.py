"""Endpoints about the server: models, health, information, metrics, replicas of ``--dp``."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from radixrt import __version__
from radixrt.api.banner import greeting
from radixrt.api.http.browsers import accepts_html, is_terminal
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.http.middleware import new_id
from radixrt.api.page import files
from radixrt.api.requests.protocol import RequestBody
from radixrt.api.state import Context, Here
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY, SamplingParams
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import EngineInfo
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import DrainReplicaCall, FlushCacheCall, StatsCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import DEFAULT_POOLING, GenerateRequest, RequestOptions, TokenPrompt

HEALTH_TIMEOUT_S = 30


routes = Endpoints()
routes.include_router(files.routes)


@routes.get("/")
async def root(request: Request, context: Here) -> Response:
    state = context.state
    if accepts_html(request.headers):
        response = files.response(request, "index.html")
    elif is_terminal(request.headers):
        url = str(request.base_url).rstrip("/")
        text = greeting(state.config, state.info, url, needs_key=state.keys.are_declared)
        response = Response(text, media_type="text/plain")
    else:
        response = json_response(
            {
                "server": f"radixrt {__version__}",
                "model": state.config.model_name,
                "documentation": "docs/api.md in the source tree; machine-readable: /openapi.json",
                "endpoints": sorted(request.app.openapi()["paths"]),
            }
        )
    response.headers["vary"] = "accept, user-agent"
    return response


@routes.get("/v1/models")
async def models(context: Here) -> Response:
    each = [_model(context, name) for name in context.state.config.model_names]
    each += [_adapter(context, info) for info in context.state.client.adapters.values()]
    return json_response({"object": "list", "data": each})


@routes.get("/v1/models/{model:path}")
async def model(context: Here, model: str) -> Response:
    info = context.state.adapter_of(model)
    return json_response(_model(context, model) if info is None else _adapter(context, info))


@routes.post("/ping", include_in_schema=False)  # as SageMaker and its like call it
@routes.get("/ping")
@routes.get("/health")
async def health() -> Response:
    return json_response({"status": "ok"})


@routes.get("/ready")
async def ready(context: Here) -> Response:
    return readiness(context.state.is_draining, context.state.client.is_ready)


def readiness(is_draining: bool, is_well: bool) -> Response:
    """The answer of ``/ready``.

    Raises:
        RequestError: requests would not be answered.
    """
    if is_draining:
        raise RequestError("The server is shutting down.", status=503)
    if not is_well:
        raise RequestError("The engine is being restarted, or hangs.", status=503)
    return json_response({"status": "ready"})


@routes.get("/health_generate")
async def health_generate(context: Here) -> Response:
    """Go the whole way of a request: through queue, prefill and sampling."""
    generates = context.state.info.pooling is None
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    probe = GenerateRequest(
        request_id=new_id("health"),
        prompt=TokenPrompt(pack_ids([0])),
        options=RequestOptions(
            sampling=one_token if generates else PREFILL_ONLY,
            root=CacheRoot(salt="health"),
            pool=None if generates else DEFAULT_POOLING,
        ),
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await context.wait(context.state.run([probe]))
    except TimeoutError as error:
        message = f"The engine gave no token within {HEALTH_TIMEOUT_S} s."
        raise RequestError(message, status=503) from error
    return json_response({"status": "ok"})


@routes.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@routes.get("/model_info")
@routes.get("/get_model_info")
async def get_model_info(context: Here) -> Response:
    state = context.state
    return json_response(
        {
            "model_path": state.config.model_path,
            "tokenizer_path": state.config.tokenizer_path or state.config.model_path,
            "served_model_name": state.config.model_name,
            "is_generation": state.info.pooling is None,
            "preferred_sampling_params": state.default_sampling or None,
        }
        | _without_ids(state.info)
    )


@routes.get("/server_info")
@routes.get("/get_server_info")
async def get_server_info(context: Here, check_invariants: bool = False) -> Response:
    stats = await context.call(StatsCall(check_invariants))
    settings = dataclasses.asdict(context.state.config)
    del settings["api_key"]
    info = {
        "version": __version__,
        "settings": settings,
        "engine": _without_ids(context.state.info),
        "stats": msgspec.to_builtins(stats),
    }
    if check_invariants:  # else it would have failed
        info["invariants"] = "ok"
    return json_response(info)


@routes.get("/metrics")
async def metrics(context: Here) -> Response:
    await context.state.metrics.refresh(context.state.client)
    return exposition(context.request, context.state.metrics.exported)


def exposition(request: Request, registry: CollectorRegistry) -> Response:
    """The metrics of a registry, in the format that the client takes."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=media_type)


@routes.get("/load")
async def load(context: Here) -> Response:
    return json_response({"server_load": context.state.num_open})


@routes.get("/props")
async def props(context: Here) -> Response:
    return json_response(
        {
            "default_generation_settings": {"n_ctx": context.state.info.context_length},
            "total_slots": context.state.info.max_running_requests,
            "model_alias": context.state.config.model_name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"radixrt {__version__}",
        }
    )


@routes.get("/tokenizer_info")
async def tokenizer_info(context: Here) -> Response:
    folder = Path(context.state.config.tokenizer_path or context.state.config.model_path)
    return json_response(await asyncio.to_thread(_tokenizer_config, folder))


@routes.post("/flush_cache")
async def flush_cache(context: Here) -> Response:
    pages_freed = await context.call(FlushCacheCall())
    return json_response({"success": True, "pages_freed": pages_freed})


class ReplicaRequest(RequestBody, kw_only=True):
    """Names a replica."""

    replica: Annotated[int, msgspec.Meta(ge=0)]


@routes.takes("/v1/replicas/drain", ReplicaRequest)
async def drain_replica(fields: ReplicaRequest, context: Context) -> Response:
    _check_replicas(context)
    await context.call(DrainReplicaCall(fields.replica))
    return json_response({"replica": fields.replica, "state": "drained"})


@routes.takes("/v1/replicas/start", ReplicaRequest)
async def start_replica(fields: ReplicaRequest, context: Context) -> Response:
    _check_replicas(context)
    context.state.client.start_replica(fields.replica)
    return json_response({"replica": fields.replica, "state": "started"})


def _check_replicas(context: Context) -> None:
    """Let no request end the only engine."""
    if context.state.info.replicas == 1:
        raise RequestError("This server has no replicas: --dp is 1.", status=404)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` with the chat template, wherever the checkpoint keeps it."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: dict[str, Any] = orjson.loads(file.read_bytes()) if file.is_file() else {}
    if template.is_file():
        config["chat_template"] = template.read_text()
    return config


def _model(context: Context, name: str) -> dict[str, Any]:
    state = context.state
    return model_entry(state.config, state.info, state.started_at, name)


def _adapter(context: Context, info: AdapterInfo) -> dict[str, Any]:
    """The object of an adapter in ``/v1/models``."""
    return adapter_entry(_model(context, info.name), context.state.config.model_name, info)


def adapter_entry(entry: dict[str, Any], parent: str, info: AdapterInfo) -> dict[str, Any]:
    """The object of an adapter, given that of a model of its name."""
    return entry | {"root": info.path, "parent": parent, "digest": info.digest}


def model_entry(
    config: ServerConfig, info: EngineInfo | None, created_at: int, name: str
) -> dict[str, Any]:
    """The object of a model in ``/v1/models``.

    Args:
        info: None: it was not loaded yet.
    """
    return {
        "id": name,
        "object": "model",
        "created": created_at,
        "owned_by": "radixrt",
        "root": config.model_path,
        "max_model_len": None if info is None else info.context_length,
    }


def _without_ids(engine: EngineInfo) -> dict[str, Any]:
    info: dict[str, Any] = msgspec.to_builtins(engine)
    del info["type"]
    return info
