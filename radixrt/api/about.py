"""Endpoints about the server: models, health, information, metrics."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from radixrt import __version__
from radixrt.api.banner import greeting
from radixrt.api.http.browsers import accepts_html, is_terminal
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.middleware import new_id
from radixrt.api.page.files import PageFiles, page_routes
from radixrt.api.state import ServerState
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY, SamplingParams
from radixrt.messages.answers import EngineInfo
from radixrt.messages.calls import FlushCacheCall, StatsCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import DEFAULT_POOLING, GenerateRequest, RequestOptions, TokenPrompt

HEALTH_TIMEOUT_S = 30


def about_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    page = PageFiles()
    router.include_router(page_routes(page))

    @router.get("/")
    async def root(request: Request) -> Response:
        if accepts_html(request.headers):
            response = page.response(request, "index.html")
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

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [_model(state, name) for name in state.config.model_names]}
        )

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        state.check_model(model)
        return json_response(_model(state, model))

    @router.post("/ping", include_in_schema=False)  # as SageMaker and its like call it
    @router.get("/ping")
    @router.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        if state.is_draining:
            raise RequestError("The server is shutting down.", status=503)
        if not state.client.is_ready:
            raise RequestError("The engine is being restarted, or hangs.", status=503)
        return json_response({"status": "ready"})

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        await while_connected(request, _generate_one_token(state))
        return json_response({"status": "ok"})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def get_model_info() -> Response:
        return json_response(
            {
                "model_path": state.config.model_path,
                "tokenizer_path": state.config.tokenizer_path or state.config.model_path,
                "served_model_name": state.config.model_name,
                "is_generation": state.info.pooling is None,
                "preferred_sampling_params": state.default_sampling or None,
            }
            | _without_ids(state)
        )

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def get_server_info(check_invariants: bool = False) -> Response:
        stats = await state.client.call(StatsCall(check_invariants))
        settings = dataclasses.asdict(state.config)
        del settings["api_key"]
        info = {
            "version": __version__,
            "settings": settings,
            "engine": _without_ids(state),
            "stats": msgspec.to_builtins(stats),
        }
        if check_invariants:  # else it would have failed
            info["invariants"] = "ok"
        return json_response(info)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        await state.metrics.refresh(state.client)
        return Response(encode(state.metrics.exported), media_type=media_type)

    @router.get("/load")
    async def load() -> Response:
        return json_response({"server_load": state.num_open})

    @router.get("/props")
    async def props() -> Response:
        return json_response(
            {
                "default_generation_settings": {"n_ctx": state.info.context_length},
                "total_slots": state.info.max_running_requests,
                "model_alias": state.config.model_name,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"radixrt {__version__}",
            }
        )

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        folder = Path(state.config.tokenizer_path or state.config.model_path)
        return json_response(await asyncio.to_thread(_tokenizer_config, folder))

    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        pages_freed = await state.client.call(FlushCacheCall())
        return json_response({"success": True, "pages_freed": pages_freed})

    return router


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` with the chat template, wherever the checkpoint keeps it."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: dict[str, Any] = orjson.loads(file.read_bytes()) if file.is_file() else {}
    if template.is_file():
        config["chat_template"] = template.read_text()
    return config


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return model_entry(state.config, state.info, state.started_at, name)


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


def _without_ids(state: ServerState) -> dict[str, Any]:
    info: dict[str, Any] = msgspec.to_builtins(state.info)
    del info["type"]
    return info


async def _generate_one_token(state: ServerState) -> None:
    """Go the whole way of a request: through queue, prefill and sampling.

    Raises:
        RequestError: it did not come back, or not in time.
    """
    generates = state.info.pooling is None
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        request_id=new_id("health"),
        prompt=TokenPrompt(pack_ids([0])),
        options=RequestOptions(
            sampling=one_token if generates else PREFILL_ONLY,
            cache_salt="health",
            pool=None if generates else DEFAULT_POOLING,
        ),
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await state.run([request])
    except TimeoutError as error:
        raise RequestError(
            f"The engine gave no token within {HEALTH_TIMEOUT_S} s.", status=503
        ) from error
