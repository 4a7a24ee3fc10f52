"""The application in front of several models: what is asked of all of them, and their list."""

import itertools
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from radixrt.api.about import model_entry
from radixrt.api.app import ERROR_SHAPES, check_requests
from radixrt.api.http.errors import install_error_handlers
from radixrt.api.http.events import json_response
from radixrt.api.http.keys import Keys
from radixrt.api.models.dispatcher import Dispatcher
from radixrt.api.models.model import LoadableModel
from radixrt.api.models.models import Models
from radixrt.api.models.pull import pull
from radixrt.api.ollama.routes import NEVER, ollama_model
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError


def front_app(config: ServerConfig, models: Models, keys: Keys, run_dir: Path) -> FastAPI:
    """The application of a server that has several models.

    Args:
        run_dir: has the settings of the server.
    """
    app = FastAPI(title="radixrt", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app, ERROR_SHAPES)
    check_requests(app, config, keys, lambda: models.is_draining)
    app.router.redirect_slashes = False
    app.router.default = Dispatcher(models)
    registry = CollectorRegistry()
    registry.register(_AllMetrics(models))

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(
            {
                "object": "list",
                "data": [
                    _entry(one, name) for one in models.all for name in one.config.model_names
                ],
            }
        )

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return json_response(_entry(models.find(name), name))

    @app.post("/ping")
    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if models.is_draining:
            raise RequestError("The server is shutting down.", status=503)
        if models.loaded and not any(model.is_ready for model in models.loaded):
            raise RequestError("The engines are being restarted, or hang.", status=503)
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        for model in models.all:
            if model.state is None:
                continue
            if model.is_ready:
                await model.state.metrics.refresh(model.client)
            else:
                model.state.metrics.engine.stats = None
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=media_type)

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": sum(model.in_use for model in models.all)})

    @app.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": [_of_ollama(model) for model in models.all]})

    @app.get("/api/ps")
    async def running() -> Response:
        return json_response({"models": [_running(model) for model in models.loaded]})

    @app.post("/api/pull")
    async def pull_model(request: Request) -> Response:
        return await pull(request, models, run_dir)

    return app


def _entry(model: LoadableModel, name: str) -> dict[str, Any]:
    info = None if model.state is None else model.state.info
    entry = model_entry(model.config, info, model.created_at, name)
    return entry | {"state": model.place}


def _of_ollama(model: LoadableModel) -> dict[str, Any]:
    info = None if model.state is None else model.state.info
    return ollama_model(model.name, info, model.created_at)


def _running(model: LoadableModel) -> dict[str, Any]:
    assert model.state is not None
    info, expires = model.state.info, NEVER
    if model.expires_at < math.inf:
        left_s = 0.0 if model.in_use else max(0.0, model.expires_at - time.monotonic())
        if model.in_use:
            left_s = model.keep_alive_s or 0.0
        expires = (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat()
    return _of_ollama(model) | {
        "expires_at": expires.replace("+00:00", "Z"),
        "size": model.need_bytes,
        "size_vram": model.need_bytes if info.device != "cpu" else 0,
        "context_length": info.context_length,
    }


class _AllMetrics(Collector):
    """The metrics of all models, which differ in their label ``model_name``."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        states = [model.state for model in self._models.all if model.state is not None]
        for family in itertools.chain.from_iterable(
            one.metrics.exported.collect() for one in states
        ):
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].samples += family.samples
        yield from families.values()
        loaded = GaugeMetricFamily(
            "radixrt_model_loaded", "Whether a model is loaded.", labels=["model_name"]
        )
        loads = GaugeMetricFamily(
            "radixrt_model_loads", "Times that a model was loaded.", labels=["model_name"]
        )
        for model in self._models.all:
            loaded.add_metric([model.name], float(model.is_loaded))
            loads.add_metric([model.name], model.loads)
        yield from (loaded, loads)
