"""The application in front of several models: what is asked of all of them, and the way of each
request to its model."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt.api import about
from radixrt.api.app import build_app, check_requests
from radixrt.api.conversations.store import ConversationStore
from radixrt.api.http.endpoints import SMALL_BODY_BYTES, read_json
from radixrt.api.http.errors import install_error_handlers
from radixrt.api.http.events import LineStream, json_line, json_response, while_receiving
from radixrt.api.http.gate import CONTROL_PATHS
from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.http.keys import Keys
from radixrt.api.models.models import RETRY_AFTER_S, LoadableModel, Models
from radixrt.api.ollama.routes import NEVER, ollama_adapter, ollama_model
from radixrt.api.ollama.translation import TAG, seconds_of
from radixrt.api.requests.options import waited_s
from radixrt.api.state import KEPT_CONVERSATIONS_TTL_S, ServerState
from radixrt.api.tracing import Tracing
from radixrt.base.child import ServedModel
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError, wrong
from radixrt.base.liveness.link import AddModel, SupervisorLink
from radixrt.client.engine_client import EngineClient
from radixrt.messages.answers import EngineInfo


def front_app(config: ServerConfig, models: Models, keys: Keys, run_dir: Path) -> FastAPI:
    """The application of a server that has several models.

    Args:
        run_dir: has the settings of the server.
    """
    app = FastAPI(title="radixrt", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    check_requests(app, config, keys, lambda: models.is_draining)
    app.router.redirect_slashes = False
    app.router.default = Dispatcher(models)
    for path in ("/ping", "/health"):
        app.get(path)(about.health)
    app.post("/ping")(about.health)
    registry = CollectorRegistry()
    registry.register(_AllMetrics(models))

    @app.get("/v1/models")
    async def list_models() -> Response:
        each = [_entry(one, name) for one in models.all for name in _names(one)]
        return json_response({"object": "list", "data": each})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return json_response(_entry(models.find(name), name))

    @app.get("/ready")
    async def ready() -> Response:
        is_well = not models.loaded or any(model.is_ready for model in models.loaded)
        return about.readiness(models.is_draining, is_well)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        for model in models.all:
            if model.state is not None and model.is_ready:
                await model.state.metrics.refresh(model.client)
            elif model.state is not None:
                model.state.metrics.engine.stats = None
        return about.exposition(request, registry)

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": sum(model.in_use for model in models.all)})

    @app.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": [one for model in models.all for one in _listed(model)]})

    @app.get("/api/ps")
    async def running() -> Response:
        return json_response({"models": [_running(model) for model in models.loaded]})

    @app.post("/api/pull")
    async def pull(request: Request) -> Response:
        body = await read_json(request, JsonBounds())
        name = body.get("model") or body.get("name")
        if not isinstance(name, str):
            raise wrong("model", "must name a model of the hub, as USER/NAME")
        lines = _pulled(name.removesuffix(TAG), models, run_dir)
        if body.get("stream") is not False:
            return LineStream(lines, lambda: {"status": f"pulling {name}"})
        async with aclosing(lines):
            *_, last = [line async for line in lines]
        return Response(last, media_type="application/json")

    return app


async def _pulled(name: str, models: Models, run_dir: Path) -> AsyncGenerator[bytes, None]:
    """Download a model of the hub, which the server then serves, too. The process that downloads
    ends with its client's request.

    Raises:
        RequestError: it cannot be downloaded, or not be served.
    """
    yield json_line({"status": "pulling manifest"})
    if not models.has(name):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "radixrt.supervisor.pull", str(run_dir), name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,  # of a line: the last one has all settings
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                message: dict[str, Any] = orjson.loads(line)
                if "error" in message:
                    raise RequestError(message["error"])
                if "total" in message:
                    yield json_line({"status": f"pulling {name}", "digest": name, **message})
                else:
                    models.add(msgspec.convert(message, ServedModel))
            if await process.wait():
                reason = "The download has failed; the server's log has the reason."
                raise RequestError(reason, status=500)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    yield json_line({"status": "success"})


def _entry(model: LoadableModel, name: str) -> dict[str, Any]:
    info = None if model.state is None else model.state.info
    adapter = model.adapter(name)
    entry = about.model_entry(
        model.config, info, model.created_at, adapter.name if adapter else name
    )
    if adapter is not None:
        entry = about.adapter_entry(entry, model.name, adapter)
    return entry | {"state": model.place}


def _names(model: LoadableModel) -> list[str]:
    return [*model.config.model_names, *model.client.adapters]


def _of_ollama(model: LoadableModel) -> dict[str, Any]:
    info = None if model.state is None else model.state.info
    return ollama_model(model.name, info, model.created_at)


def _listed(model: LoadableModel) -> list[dict[str, Any]]:
    """A model and its adapters in Ollama's list."""
    base = _of_ollama(model)
    return [base, *(ollama_adapter(base, info) for info in model.client.adapters.values())]


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
        for model in self._models.all:
            for family in model.state.metrics.exported.collect() if model.state else ():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        for name, text, value in _OF_MODELS:
            gauge = GaugeMetricFamily(f"radixrt_{name}", text, labels=["model_name"])
            for model in self._models.all:
                gauge.add_metric([model.name], value(model))
            yield gauge


_OF_MODELS: tuple[tuple[str, str, Callable[[LoadableModel], float]], ...] = (
    ("model_loaded", "Whether a model is loaded.", lambda model: float(model.is_loaded)),
    ("model_loads", "Times that a model was loaded.", lambda model: model.loads),
)
"""Names, texts and values of further metrics."""


async def start_models(
    served: Sequence[ServedModel],
    keys: Keys,
    supervisor: SupervisorLink,
    connect: Callable[[int, ServerConfig], EngineClient],
    trace: Callable[[ServerConfig], Tracing | None],
) -> Models:
    """
    Args:
        connect: makes the client of a model, by its number.
        trace: makes the exporter of a model's traces.

    Returns:
        the models, of which the first is loaded.

    Raises:
        RequestError: the first model cannot be loaded.
    """
    first = served[0].config
    conversations = ConversationStore(first.kept_conversations_mb << 20, KEPT_CONVERSATIONS_TTL_S)

    def make_app(model: LoadableModel, info: EngineInfo) -> tuple[ServerState, ASGIApp]:
        state = ServerState(model.config, model.client, info, keys, conversations)
        return state, build_app(state, trace(model.config), is_one_of_several=True)

    def make(number: int, one: ServedModel) -> LoadableModel:
        link = supervisor.of_model(number)
        if number >= len(served):
            supervisor.tell(AddModel(one.config))
        return LoadableModel(one, connect(number, one.config), link, make_app)

    models = Models(
        served,
        make,
        memory_bytes=math.inf if first.model_memory_mb is None else first.model_memory_mb << 20,
        max_loaded=first.max_loaded_models or math.inf,
        max_wait_s=first.max_queue_seconds or math.inf,
    )
    await models.all[0].load(is_first=True)
    models.start()
    return models


ABORT_PATH = "/abort_request"
GENERATING_PROBE = "/health_generate"
"""The one GET request that loads a model."""
OF_OLLAMA = "/api/"
NOT_LOADING = CONTROL_PATHS | {"/api/show", "/v1/conversations"}
"""POST requests that do not load a model."""


class _Named(msgspec.Struct):
    """The fields of a body by which it is handed on. The application of the model checks their
    types, and everything else."""

    model: Any = None
    name: Any = None
    timeout: Any = None
    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def is_empty(self) -> bool:
        """It only asks to load or to unload the model."""
        return not (bytes(self.prompt) or bytes(self.messages) or bytes(self.input))


_decoder = msgspec.json.Decoder(_Named)


class Dispatcher:
    """The ASGI application in front of those of the models."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._bounds = JsonBounds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["method"] != "POST":
            model = self._models.find(request.query_params.get("model"))
            async with AsyncExitStack() as stack:
                if scope["path"] == GENERATING_PROBE:
                    await stack.enter_async_context(self._models.use(model))
                await self._hand_on(model, scope, receive, send)
            return
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        named = await self._named(body)
        is_ollama = scope["path"].startswith(OF_OLLAMA)
        name = named.model or (is_ollama and named.name) or request.query_params.get("model")
        name = (name.removesuffix(TAG) if is_ollama else name) if isinstance(name, str) else None
        if name is None and scope["path"] == ABORT_PATH:
            await self._abort(scope, body, receive, send)
            return
        model = self._models.find(name)
        request.state.caller.check_model(model.config.model_names)
        keep_alive_s = None
        if is_ollama and named.keep_alive is not None:
            keep_alive_s = seconds_of(named.keep_alive)
        only_unloads = keep_alive_s == 0 and named.is_empty
        async with AsyncExitStack() as stack:
            if not (model.app and (scope["path"] in NOT_LOADING or only_unloads)):
                begun = time.monotonic()
                await while_receiving(
                    receive,
                    stack.enter_async_context(self._models.use(model, _timeout(named.timeout))),
                )
                token = waited_s.set(time.monotonic() - begun)
                stack.callback(waited_s.reset, token)
            if keep_alive_s is not None:
                model.keep_alive_s = keep_alive_s if keep_alive_s >= 0 else None
            await self._hand_on(model, scope, _again(body, receive), send)

    async def _hand_on(
        self, model: LoadableModel, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if model.app is None:
            raise RequestError(
                f"{model.name} is not loaded yet; a request that generates loads it.",
                status=503,
                retry_after_s=RETRY_AFTER_S,
            )
        await model.app(scope, receive, send)

    async def _abort(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """A request whose model is not named may be that of any; all of them give the same
        answer."""
        *others, last = [model for model in self._models.all if model.app is not None]
        for model in others:
            await self._hand_on(model, {**scope}, _again(body, receive), _nowhere)
        await self._hand_on(last, scope, _again(body, receive), send)

    async def _named(self, body: bytes) -> _Named:
        """A body that is no JSON object names no model: the first model's application says so."""
        try:
            if len(body) <= SMALL_BODY_BYTES:
                return _decoder.decode(body)
            await self._bounds.check(body)
            return await self._bounds.in_turn(lambda: _decoder.decode(body))
        except (ValueError, RecursionError):
            return _Named()


def _timeout(given: Any) -> float | None:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number and given > 0 else None


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that was read, and what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _nowhere(message: Message) -> None:
    pass
