"""A load that one of several replicas refuses changes none of them."""

import asyncio
from typing import Any

import msgspec
import pytest

from radixrt.base.errors import RequestError
from radixrt.client.engine_client import EngineClient
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.calls import LoadAdapterCall, UnloadAdapterCall


class Replicas:
    """The names that each of two replicas has, with digests; a digest is what its folder holds."""

    def __init__(self) -> None:
        self.files = {"/old": "old", "/new": "new"}
        self.names: list[dict[str, str]] = [{}, {}]
        self.refused: set[tuple[int, str]] = set()
        """Replicas, and the paths that they cannot load."""
        self.other_bytes: dict[tuple[int, str], str] = {}

    async def ask(self, call: Any) -> AdapterInfo:
        values, errors = {}, []
        for replica, names in enumerate(self.names):
            try:
                values[replica] = self.one(replica, names, call)
            except RequestError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return msgspec.convert(type(call).merge(values, 2), AdapterInfo)

    def one(self, replica: int, names: dict[str, str], call: Any) -> dict[str, Any]:
        if isinstance(call, UnloadAdapterCall):
            if call.name not in names:
                raise RequestError("not loaded", status=404)
            digest, path = names.pop(call.name), ""
        else:
            path = call.path
            digest = self.other_bytes.get((replica, path), self.files[path])
            if (call.name in names and not call.replaces) or (replica, path) in self.refused:
                raise RequestError("refused")
            names[call.name] = digest
        return {"name": call.name, "digest": digest, "path": path, "place": 0}


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def client(replicas: Replicas) -> EngineClient:
    client = EngineClient.__new__(EngineClient)
    client.adapters, client.lost_adapters = {}, set()
    client._adapter_calls = asyncio.Lock()
    client._calls = replicas  # type: ignore[assignment]
    return client


def load(client: EngineClient, path: str, replaces: bool = False) -> None:
    asyncio.run(client._load_adapter(LoadAdapterCall(name="hot", path=path, replaces=replaces)))


def test_a_new_name_is_loaded_by_all_or_by_none(client: EngineClient, replicas: Replicas) -> None:
    replicas.refused = {(1, "/new")}
    with pytest.raises(RequestError, match="refused"):
        load(client, "/new")
    assert replicas.names == [{}, {}] and not client.adapters
    replicas.refused = set()
    load(client, "/new")
    assert replicas.names == [{"hot": "new"}] * 2 and client.adapters["hot"].digest == "new"


def test_replicas_that_read_other_bytes_load_nothing(
    client: EngineClient, replicas: Replicas
) -> None:
    replicas.other_bytes = {(1, "/new"): "newer"}
    with pytest.raises(RequestError, match="--dp"):
        load(client, "/new")
    assert replicas.names == [{}, {}] and not client.adapters


def test_a_name_keeps_its_adapter(client: EngineClient, replicas: Replicas) -> None:
    load(client, "/old")
    with pytest.raises(RequestError):
        load(client, "/new")
    assert replicas.names == [{"hot": "old"}] * 2
    replicas.refused = {(1, "/new")}
    with pytest.raises(RequestError):
        load(client, "/new", replaces=True)
    assert replicas.names == [{"hot": "old"}] * 2 and client.adapters["hot"].digest == "old"
    replicas.files["/old"] = "changed"
    with pytest.raises(RequestError):
        load(client, "/new", replaces=True)
    assert replicas.names == [{}, {}] and not client.adapters
