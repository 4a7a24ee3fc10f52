"""Decides which of several models are loaded, within the memory that they may take together.

A model is loaded for the first request that names it. If there is no room, the models that nobody
uses are unloaded first, the least recently used one before others. If all are in use, the request
waits for them to end, and from ``TURN_S`` on further requests for one of them wait behind it, so
that a model that is always in use cannot keep another out.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import ASGIApp

from radixrt.api.state import ServerState
from radixrt.base.child import ServedModel
from radixrt.base.errors import RequestError, shown
from radixrt.base.liveness.link import LoadModel, ServerStatus, SupervisorLink, UnloadModel
from radixrt.base.liveness.supervision import supervise
from radixrt.base.settings.adapters import named_adapters
from radixrt.client.engine_client import EngineClient
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import EngineInfo

log = logging.getLogger(__name__)

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

    def adapter(self, name: str) -> AdapterInfo | None:
        """The adapter that it had at its last load under this name."""
        own = self.config.name_behind_base(name)
        adapters = self.client.adapters
        return adapters.get(name) or (None if own is None else adapters.get(own))

    def has_adapter(self, name: str) -> bool:
        """Whether a request for a model of this name is for an adapter of this one."""
        if name in self.client.adapters or name in self.client.lost_adapters:
            return True
        has_base = self.config.name_behind_base(name) is not None
        return has_base or name in named_adapters(self.config.lora)

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


TURN_S = 5.0
"""Time for which a model has its memory, though requests for another one wait."""

DRAIN_LOOK_S = 0.05


class Models:
    """The models of a server. Lives in one event loop.

    Args:
        served: at least one; requests that name none are for the first.
        make: makes a model, by its number.
        memory_bytes: for those that are loaded together; infinity: there is no limit.
        max_loaded: most models at a time.
        max_wait_s: longest wait for memory that others use.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        make: Callable[[int, ServedModel], LoadableModel],
        memory_bytes: float = math.inf,
        max_loaded: float = math.inf,
        max_wait_s: float = math.inf,
    ) -> None:
        self._make = make
        self.all = [make(number, one) for number, one in enumerate(served)]
        self.is_draining = False
        self._memory_bytes = memory_bytes
        self._max_loaded = max_loaded
        self._max_wait_s = max_wait_s
        self._loading = asyncio.Lock()
        """Held while models are loaded or unloaded, in the order of the requests for that."""
        self._leaving: set[LoadableModel] = set()
        """Models in use whose memory the next one gets; they take no new requests."""
        self._may_begin = asyncio.Event()
        """No model is leaving."""
        self._may_begin.set()
        self._loads: dict[LoadableModel, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        """A request has ended, or a model is loaded or unloaded."""

    def start(self) -> None:
        """Unload what is idle for long enough, from now on, and note what dies too often."""
        supervise(asyncio.create_task(self._unload_idle()), "The unloading of idle models")
        for model in self.all:
            supervise(asyncio.create_task(self._watch(model)), "The watch over a model")

    def add(self, served: ServedModel) -> None:
        """One more model, which is not loaded."""
        model = self._make(len(self.all), served)
        self.all.append(model)
        supervise(asyncio.create_task(self._watch(model)), "The watch over a model")

    def has(self, name: str) -> bool:
        return any(name in model.config.model_names for model in self.all)

    @property
    def loaded(self) -> list[LoadableModel]:
        return [model for model in self.all if model.is_loaded]

    def find(self, name: str | None) -> LoadableModel:
        """
        Args:
            name: None: the first model.

        Raises:
            RequestError: no model is called so.
        """
        for model in self.all:
            if name is None or name in model.config.model_names:
                return model
        for model in self.all:
            if name is not None and model.has_adapter(name):
                return model
        names = ", ".join(model.name for model in self.all)
        raise RequestError(
            f"The model {shown(name)} is not served here; this server has {names}.",
            status=404,
            param="model",
            code="model_not_found",
        )

    @contextlib.asynccontextmanager
    async def use(self, model: LoadableModel, wait_s: float | None = None) -> AsyncIterator[None]:
        """Load a model if it is not, and keep it loaded until the block ends.

        Args:
            wait_s: longest wait for that; None: as long as the load takes, and the wait for memory
                may.

        Raises:
            RequestError: it could not be loaded, or not in time.
        """
        try:
            async with asyncio.timeout(wait_s):
                while model in self._leaving:
                    await self._may_begin.wait()
                model.in_use += 1
                try:
                    while not model.is_loaded:
                        await asyncio.shield(self._load(model))
                except BaseException:
                    self._end_use(model)
                    raise
        except TimeoutError:
            raise self._no_room(model) from None
        try:
            yield
        finally:
            self._end_use(model)

    def _end_use(self, model: LoadableModel) -> None:
        model.in_use -= 1
        model.used_at = time.monotonic()
        self._changed.set()

    async def drain(self, grace_s: float, reason: str) -> None:
        """Wait until no request is open. Those that are after ``grace_s`` end with an error that
        says the reason."""
        deadline = time.monotonic() + grace_s
        while any(model.in_use for model in self.all) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_LOOK_S)
        for model in self.all:
            await model.client.drain(0.0, reason)

    # ------------------------------------------------------------ loading

    def _load(self, model: LoadableModel) -> "asyncio.Task[None]":
        """The load of a model, for all requests that wait for it."""
        task = self._loads.get(model)
        if task is None or task.done():
            task = self._loads[model] = asyncio.create_task(self._make_room_and_load(model))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        return task

    async def _make_room_and_load(self, model: LoadableModel) -> None:
        async with self._loading:
            await self._make_room(model)
            if model.in_use and not model.is_loaded:  # else nobody waits any more
                log.info("Loading %s.", model.name)
                await model.load()
                log.info("%s is loaded.", model.name)

    async def _make_room(self, model: LoadableModel) -> None:
        """Raises RequestError if other models were in use for too long."""
        begun = time.monotonic()
        try:
            while model.in_use and not model.is_loaded and (victims := self._victims(model)):
                busy = [victim for victim in victims if victim.in_use]
                now = time.monotonic()
                if not busy:
                    await self._unload(victims[0], f"{model.name} needs its memory")
                    continue
                if now - begun >= self._max_wait_s:
                    raise self._no_room(model)
                turns = [max(begun, victim.loaded_at) + TURN_S for victim in busy]
                if now >= max(turns):
                    self._leaving.update(victims)
                    self._may_begin.clear()
                self._changed.clear()
                ends = min(begun + self._max_wait_s, *(t for t in turns if t > now), now + 1.0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, ends - now)):
                        await self._changed.wait()
        finally:
            self._leaving.clear()
            self._may_begin.set()

    def _victims(self, model: LoadableModel) -> list[LoadableModel]:
        """The models to unload so that this one fits, the first one first; none: it does fit."""
        loaded, victims = self.loaded, []
        candidates = sorted(loaded, key=lambda one: (one.in_use > 0, one.used_at))
        while candidates and not self._fits([*loaded, model]):
            victims.append(candidates.pop(0))
            loaded.remove(victims[-1])
        return victims

    def _fits(self, models: Sequence[LoadableModel]) -> bool:
        needed = sum(model.need_bytes for model in models)
        return len(models) <= self._max_loaded and needed <= self._memory_bytes

    def _no_room(self, model: LoadableModel) -> RequestError:
        victims = self._victims(model)
        go = " and ".join(
            f"{one.name} ({one.need_bytes / 1e9:.2f} GB, {one.in_use} open requests)"
            for one in victims
        )
        message = (
            f"{model.name} needs {model.need_bytes / 1e9:.2f} GB; {go} would have to go first: retry when the requests "
            "have ended, or raise --model-memory-mb or --max-loaded-models."
            if go
            else f"{model.name} was not loaded in time; retry, or send a longer timeout."
        )
        return RequestError(
            message, status=503, code="model_not_loaded", retry_after_s=RETRY_AFTER_S
        )

    async def _unload(self, model: LoadableModel, why: str) -> None:
        log.info("Unloading %s: %s.", model.name, why)
        await model.unload()
        self._changed.set()

    async def _unload_idle(self) -> None:
        while True:
            now = time.monotonic()
            if any(self._is_expired(model) for model in self.loaded):
                async with self._loading:
                    for model in filter(self._is_expired, self.loaded):
                        await self._unload(model, "nobody has used it for its time")
            idle = [model.expires_at for model in self.loaded if not model.in_use]
            await asyncio.sleep(min(max(min(idle, default=math.inf) - now, 0.05), 0.5))

    @staticmethod
    def _is_expired(model: LoadableModel) -> bool:
        return model.is_loaded and not model.in_use and model.expires_at <= time.monotonic()

    async def _watch(self, model: LoadableModel) -> None:
        while True:
            log.error("%s", await model.until_failure())
            self._changed.set()
            loads = model.loads
            while model.loads == loads:
                await asyncio.sleep(0.5)
