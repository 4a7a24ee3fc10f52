"""Which of several models are loaded, and when."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from radixrt.api.http.keys import Keys
from radixrt.api.models import models as module
from radixrt.api.models.front import front_app
from radixrt.api.models.models import LoadableModel, Models
from radixrt.base.child import ServedModel
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.messages.adapters import AdapterInfo

GB = 10**9
LOAD_S = 0.02


class FakeModel(LoadableModel):
    """A model without an engine."""

    def __init__(self, name: str, events: list[str], need_bytes: int = GB) -> None:
        self.config = ServerConfig(served_model_name=name)
        self.events, self.need_bytes = events, need_bytes
        self.app = self.state = None
        self.is_loaded, self.in_use, self.loads = False, 0, 0
        self.used_at = self.loaded_at = time.monotonic()
        self.keep_alive_s: float | None = None
        self.failure = ""

    def has_adapter(self, name: str) -> bool:
        return False

    async def load(self, *, is_first: bool = False) -> None:
        self.loads += 1
        await asyncio.sleep(LOAD_S)
        if self.failure:
            raise RequestError(self.failure, status=503)
        self.events.append(f"+{self.name}")
        self.is_loaded, self.loaded_at, self.used_at = True, time.monotonic(), time.monotonic()

    async def unload(self) -> None:
        assert not self.in_use, "a model with open requests is unloaded"
        self.is_loaded = False
        self.events.append(f"-{self.name}")
        await asyncio.sleep(LOAD_S)

    async def until_failure(self) -> str:
        return await asyncio.Event().wait() or ""


def run(
    test: Callable[[Models, list[FakeModel], list[str]], Awaitable[None]],
    *,
    memory_gb: float = 2,
    needs: tuple[float, ...] = (1, 1, 1),
    max_wait_s: float = 30.0,
) -> list[str]:
    events: list[str] = []

    async def body() -> None:
        made = [
            FakeModel(name, events, int(need * GB))
            for name, need in zip("abc", needs, strict=False)
        ]
        served = [ServedModel(model.config, model.need_bytes) for model in made]
        models = Models(
            served, lambda number, one: made[number], memory_gb * GB, max_wait_s=max_wait_s
        )
        models.start()
        async with asyncio.timeout(20):
            await test(models, made, events)

    asyncio.run(body())
    return events


async def ask(models: Models, model: LoadableModel, seconds: float = 0.0) -> None:
    async with models.use(model):
        assert model.is_loaded
        await asyncio.sleep(seconds)
        assert model.is_loaded


def test_the_least_recently_used_model_goes_first() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        a, b, c = made
        for model in (a, b, a, c, a, b):
            await ask(models, model)

    assert run(test) == ["+a", "+b", "-b", "+c", "-c", "+b"]


def test_as_many_go_as_the_memory_needs() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        a, b, c = made
        for model in (a, b, c):
            await ask(models, model)

    assert run(test, needs=(1, 1, 2)) == ["+a", "+b", "-a", "-b", "+c"]
    assert run(test, memory_gb=4) == ["+a", "+b", "+c"]


def test_a_model_is_loaded_once_for_all_that_wait_for_it() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        await asyncio.gather(*(ask(models, made[0]) for _ in range(20)))

    assert run(test) == ["+a"]


def test_no_model_in_use_is_unloaded_and_the_refusal_names_it() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        a, b, c = made
        async with models.use(a), models.use(b):
            with pytest.raises(RequestError, match=r"c needs 1\.00 GB; a \(1\.00 GB, 1 open") as no:
                await ask(models, c)
            assert no.value.status == 503 and no.value.retry_after_s
        await ask(models, c)

    assert run(test, max_wait_s=0.2) == ["+a", "+b", "-b", "+c"]


def test_a_request_waits_no_longer_than_its_timeout() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        a, b, c = made
        async with models.use(a), models.use(b):
            begun = time.monotonic()
            with pytest.raises(RequestError, match="would have to go first"):
                async with models.use(c, wait_s=0.1):
                    raise AssertionError
            assert time.monotonic() - begun < 1
            await ask(models, a)

    assert run(test) == ["+a", "+b"]


def test_a_model_that_is_always_in_use_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two clients of each model, whose requests overlap."""
    monkeypatch.setattr(module, "TURN_S", 0.1)
    answered: dict[str, int] = {}

    async def client(models: Models, model: LoadableModel, until: float) -> None:
        while time.monotonic() < until:
            await ask(models, model, 0.02)
            answered[model.name] = answered.get(model.name, 0) + 1
            await asyncio.sleep(0)

    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        until = time.monotonic() + 2.0
        await asyncio.gather(*(client(models, model, until) for model in made * 2))

    events = run(test, memory_gb=1)
    assert min(answered.values()) > 5 and len(answered) == 3
    assert events.count("+a") > 1


def test_what_nobody_uses_for_its_time_is_unloaded() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        a, b, _ = made
        a.keep_alive_s = 0.2
        async with models.use(a):
            await ask(models, b)
            await asyncio.sleep(0.4)
            assert a.is_loaded, "it is in use"
        await asyncio.sleep(0.1)
        assert a.is_loaded
        await asyncio.sleep(0.7)
        assert not a.is_loaded and b.is_loaded
        await ask(models, a)

    assert run(test) == ["+a", "+b", "-a", "+a"]


def test_a_load_that_fails_fails_the_requests_that_wait_for_it_and_the_next_tries_again() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        made[0].failure = "a could not be loaded: its file is gone."
        found = await asyncio.gather(
            *(ask(models, made[0]) for _ in range(3)), return_exceptions=True
        )
        assert [str(error) for error in found] == [made[0].failure] * 3
        assert made[0].loads == 1 and made[0].in_use == 0
        made[0].failure = ""
        await ask(models, made[0])

    assert run(test) == ["+a"]


def test_clients_that_leave_while_a_model_is_loaded_do_not_end_the_load() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        leaving = asyncio.ensure_future(ask(models, made[0]))
        await asyncio.sleep(LOAD_S / 4)
        leaving.cancel()
        await ask(models, made[0])
        assert made[0].in_use == 0

    assert run(test) == ["+a"]


def test_a_name_that_is_not_served_gets_the_list() -> None:
    async def test(models: Models, made: list[FakeModel], events: list[str]) -> None:
        assert models.find(None) is made[0] and models.find("b") is made[1]
        with pytest.raises(RequestError, match="this server has a, b, c"):
            models.find("d")

    run(test)


def test_lists_have_the_adapters_of_every_model_and_names_with_colons(tmp_path: Path) -> None:
    class Client:
        def __init__(self, **digests: str) -> None:
            self.lost_adapters: set[str] = set()
            self.adapters = {
                name: AdapterInfo(name=name, digest=digest, path=f"/{name}", place=0)
                for name, digest in digests.items()
            }

    class WithAdapters(FakeModel):
        has_adapter = LoadableModel.has_adapter

    async def body() -> None:
        made = [WithAdapters("X:Q4_0", []), WithAdapters("b", [])]
        for model, digest in zip(made, ("d1", "d2"), strict=True):
            model.client = Client(**{f"of {model.name[0]}": digest})  # type: ignore[assignment]
            model.created_at, model.is_loading = 0, False
        served = [ServedModel(model.config, 0) for model in made]
        models = Models(served, lambda number, one: made[number])
        assert models.find("X:Q4_0:of X") is models.find("of X") is made[0]
        app = front_app(ServerConfig(), models, Keys(), tmp_path)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            listed = (await client.get("/v1/models")).json()["data"]
            of_ollama = (await client.get("/api/tags")).json()["models"]
            one = (await client.get("/v1/models/X:Q4_0:of X")).json()
        expected = [("X:Q4_0", None, None), ("of X", "X:Q4_0", "d1"), ("b", None, None), ("of b", "b", "d2")]  # fmt: skip
        assert [(m["id"], m.get("parent"), m.get("digest")) for m in listed] == expected
        assert [m["name"] for m in of_ollama] == [name for name, *_ in expected]
        assert one == listed[1]

    asyncio.run(body())
