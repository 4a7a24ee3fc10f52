"""One of several models: its engine's client, its application, and the requests that use it."""

import asyncio
import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp

from radixrt.api.state import ServerState
from radixrt.base.child import ServedModel
from radixrt.base.errors import RequestError
from radixrt.base.liveness.link import LoadModel, ServerStatus, SupervisorLink, UnloadModel
from radixrt.client.engine_client import EngineClient
from radixrt.messages.answers import EngineInfo

OTHER_BYTES = 512 << 20
"""Memory of an engine's processes beside weights and KV pool, as the supervisor estimates it."""

RETRY_AFTER_S = 2

MakeApp = Callable[["LoadableModel", EngineInfo], tuple[ServerState, ASGIApp]]


class LoadableModel:
    """A model that the supervisor loads and unloads as this process says."""

    def __init__(
        self, served: ServedModel, client: EngineClient, link: SupervisorLink, make_app: MakeApp
    ) -> None:
        """
        Args:
            make_app: makes state and application when the model is loaded for the first time.
        """
        self.config = served.config
        self.client = client
        self.state: ServerState | None = None
        self.app: ASGIApp | None = None
        """They stay while it is not loaded."""
        self.is_loaded = self.is_loading = False
        self.need_bytes = served.need_bytes
        """Memory while it is loaded: an upper bound until that was the case once."""
        self.in_use = 0
        """Requests that it answers, or that wait until it is loaded."""
        self.used_at = self.loaded_at = time.monotonic()
        """When the last request ended; when it was loaded last."""
        self.keep_alive_s = served.config.keep_alive
        """Seconds after the last request at which it is unloaded; None: it stays until another needs
        its memory."""
        self.loads = 0
        self.created_at = int(time.time())
        self._link = link
        self._make_app = make_app

    @property
    def name(self) -> str:
        return self.config.model_name

    @property
    def first_state(self) -> ServerState:
        """The state of this model, which was loaded at least once."""
        assert self.state is not None
        return self.state

    @property
    def expires_at(self) -> float:
        """Time of ``time.monotonic()`` at which it is unloaded if nobody uses it."""
        return math.inf if self.keep_alive_s is None else self.used_at + self.keep_alive_s

    @property
    def is_ready(self) -> bool:
        return self.is_loaded and self.client.is_ready

    @property
    def place(self) -> str:
        """Its state, for lists of models."""
        if self.is_loaded:
            return "loaded" if self.client.is_ready else "restarting"
        return "loading" if self.is_loading else "unloaded"

    async def load(self, *, is_first: bool = False) -> None:
        """Let the supervisor start its engine, and wait until it can take requests.

        Args:
            is_first: the supervisor has started it with the server.

        Raises:
            RequestError: it could not be started; says why.
        """
        self.loads += 1
        self.is_loading = True
        if not is_first:
            self._link.tell(LoadModel(self._link.model))
        failing = asyncio.ensure_future(self._link.until(self._has_failed))
        starting = asyncio.ensure_future(self.client.ready())
        try:
            await asyncio.wait({failing, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise self._failed(failing.result())
            info = starting.result()
        finally:
            failing.cancel()
            starting.cancel()
            self.is_loading = False
        if self.state is None:
            self.state, self.app = self._make_app(self, info)
        self.state.info = info
        pool = info.kv_pool_tokens * info.kv_bytes_per_token
        self.need_bytes = max(1, self.config.dp) * (info.weight_bytes + pool) + OTHER_BYTES
        self.is_loaded = True
        self.loaded_at = self.used_at = time.monotonic()

    async def unload(self) -> None:
        """End its engine; returns when the supervisor has ended its processes. Nobody may use
        it."""
        self.is_loaded = False
        self.keep_alive_s = self.config.keep_alive
        self._link.tell(UnloadModel(self._link.model))
        await self._link.until(lambda status: status.loads >= self.loads and not status.is_loaded)
        self.client.unload(f"{self.name} is not loaded; a request that generates loads it.")

    async def until_failure(self) -> str:
        """Wait until it is loaded no more, because it has died too often; returns why."""
        status = await self._link.until(self._has_failed)
        self.is_loaded = False
        error = self._failed(status)
        self.client.unload(error.message)
        return error.message

    def _has_failed(self, status: ServerStatus) -> bool:
        return status.loads >= self.loads > 0 and not status.is_loaded and bool(status.failure)

    def _failed(self, status: ServerStatus) -> RequestError:
        message = f"{self.name} could not be loaded: {status.failure}"
        return RequestError(message, status=503, retry_after_s=RETRY_AFTER_S, code="model_failed")
