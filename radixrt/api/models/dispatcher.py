"""Hands each request to the application of the model that it names."""

import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from radixrt.api.http.body import SMALL_BODY_BYTES
from radixrt.api.http.events import while_receiving
from radixrt.api.http.gate import CONTROL_PATHS
from radixrt.api.http.json_bounds import JsonBounds
from radixrt.api.http.keys import caller_of
from radixrt.api.models.model import RETRY_AFTER_S, LoadableModel
from radixrt.api.models.models import Models
from radixrt.api.ollama.protocol import TAG
from radixrt.api.ollama.translation import seconds_of
from radixrt.api.requests.options import waited_s
from radixrt.base.errors import RequestError

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
        caller_of(request).check_model(model.config.model_names)
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
