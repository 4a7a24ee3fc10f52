"""API keys: who may call what, and that keys do not see each other."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from radixrt.api.app import build_app
from radixrt.api.http.browsers import PAGE_FILES
from radixrt.api.http.keys import ADMIN_PATHS, OPEN_PATHS, Keys, KeyUse
from radixrt.api.state import ServerState
from radixrt.base.api_keys import KeyLimits, KeySource, digest_of, new_key
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.messages.calls import CacheTreeCall, FlushCacheCall, ReleaseCacheCall
from radixrt.messages.requests import Tenant
from radixrt.messages.stats import TenantStats
from tests.api.conftest import RunningServer, StartServer, wait_until
from tests.servers.fake_scheduler import engine_info

KEYS = {"alice": "user", "bob": "user", "root": "admin"}


def key_file(folder: Path, **limits: object) -> Path:
    """Declares the keys "alice-key", "bob-key" and "root-key"; bob and carol share a cache."""
    entries: list[dict[str, Any]] = [
        {"name": name, "hash": digest_of(f"{name}-key"), "role": role}
        for name, role in KEYS.items()
    ]
    entries[1]["cache_group"] = "friends"
    entries.append({"name": "carol", "hash": digest_of("carol-key"), "cache_group": "friends"})
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": entries, "limits": limits}))
    return file


@pytest.fixture(scope="module")
def keyed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """Its model judges pairs of texts by two tokens."""
    keys = str(key_file(tmp_path_factory.mktemp("keys")))
    server = start_server(info=engine_info(score_tokens=(310, 311)), api_keys=keys)
    server.scheduler.vector = lambda request: (2.0, 1.0)
    return server


@pytest.fixture
def server_with_keys(keyed: RunningServer) -> RunningServer:
    keyed.scheduler.step_s = 0.0
    keyed.scheduler.requests.clear()
    keyed.scheduler.cache_calls.clear()
    keyed.answer_with("Hello")
    return keyed


def http(server: RunningServer, name: str = "", **headers: str) -> httpx.Client:
    if name:
        headers["authorization"] = f"Bearer {name}-key"
    return httpx.Client(base_url=server.url, timeout=20, headers=headers)


# ------------------------------------------------------------ the file


def test_the_command_prints_a_key_once_and_an_entry_that_the_server_takes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radixrt.cli", "key", "new", "alice", "--admin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    key = re.search(r"rx-\S+", done.stderr).group()  # type: ignore[union-attr]
    assert key not in done.stdout
    file = tmp_path / "keys.toml"
    file.write_text(done.stdout + '[[keys]]\nname = "other"\nhash = "' + digest_of("k") + '"\n')
    caller = Keys(KeySource(file=file)).find(key.encode())
    assert caller is not None and caller.tenant.name == "alice" and caller.is_admin
    with pytest.raises(ConfigError, match="letters"):
        new_key("a b", "user")


GOOD: dict[str, Any] = {"name": "a", "hash": digest_of("a")}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not valid"),
        ("[]", "not valid"),
        ({"keys": []}, "no key"),
        ({"keys": [{"name": "a"}]}, "hash"),
        ({"keys": [GOOD | {"hash": "a"}]}, "hash"),
        ({"keys": [GOOD | {"role": "root"}]}, "role"),
        ({"keys": [GOOD | {"rolle": "admin"}]}, "rolle"),
        ({"keys": [GOOD | {"limits": {"max_tokens": 0}}]}, "max_tokens"),
        ({"keys": [GOOD | {"name": "a\0b"}]}, "name"),
        ({"keys": [GOOD | {"name": "a\n"}]}, "name"),
        ({"keys": [GOOD, GOOD | {"hash": digest_of("b")}]}, "twice"),
        ({"keys": [GOOD, GOOD | {"name": "b"}]}, "twice"),
    ],
)
def test_a_wrong_file_is_refused_at_start_and_keeps_the_old_keys_later(
    tmp_path: Path, content: object, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = key_file(tmp_path)
    keys = Keys(KeySource(file=file))
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        Keys(KeySource(file=file))
    keys.reload()
    assert keys.find(b"alice-key") is not None
    assert says in caplog.text


def test_reloading_takes_new_keys_and_refuses_removed_ones(tmp_path: Path) -> None:
    keys = Keys(KeySource(file=key_file(tmp_path)))
    entry = {"name": "alice", "hash": [digest_of("new"), digest_of("alice-key")]}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    keys.reload()
    assert keys.find(b"bob-key") is None
    assert keys.find(b"new") == keys.find(b"alice-key") != None  # noqa: E711


def test_keys_come_from_the_flags_before_the_environment(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    environment = {"RADIXRT_API_KEYS": file.read_text(), "RADIXRT_API_KEY": "plain"}
    keys = Keys(KeySource.from_config(ServerConfig(), environment))
    assert keys.find(b"bob-key") is not None
    plain = keys.find(b"plain")
    assert plain is not None and plain.is_admin
    assert Keys(KeySource.from_config(ServerConfig(), {"RADIXRT_API_KEYS": str(file)})).find(
        b"bob-key"
    )
    keys = Keys(KeySource.from_config(ServerConfig(api_key="flag"), {"RADIXRT_API_KEY": "plain"}))
    assert keys.find(b"plain") is None and keys.find(b"flag") is not None
    assert not Keys(KeySource.from_config(ServerConfig(), {})).are_declared


def test_sighup_reads_the_file_again(tmp_path: Path, model_folder: Path) -> None:
    """The api process alone: the supervisor passes the signal on (tests/server/test_life.py)."""
    file = key_file(tmp_path)
    code = f"""
import asyncio, signal, sys
from radixrt.api.server import _keys
from radixrt.base.config import ServerConfig
async def main():
    keys = _keys(ServerConfig(api_keys={str(file)!r}))
    print(keys.find(b"alice-key") is not None, flush=True)
    while keys.find(b"new-key") is None:
        await asyncio.sleep(0.01)
    print(keys.find(b"alice-key"), flush=True)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    file.write_text(json.dumps({"keys": [{"name": "new", "hash": digest_of("new-key")}]}))
    os.kill(process.pid, signal.SIGHUP)
    assert process.communicate(timeout=20)[0] == "None\n"
    assert process.returncode == 0


# ------------------------------------------------------------ roles


def test_a_key_is_taken_in_either_header(server_with_keys: RunningServer) -> None:
    wrong: list[dict[str, str]] = [
        {},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic alice-key"},
        {"authorization": "Bearer wrong", "x-api-key": "alice-key"},
        {"authorization": f"Bearer {digest_of('alice-key')}"},
    ]
    right: list[dict[str, str]] = [
        {"x-api-key": "alice-key"},
        {"authorization": "bearer alice-key"},
        {"authorization": "Basic proxy", "x-api-key": "alice-key"},
    ]
    for headers in wrong:
        with http(server_with_keys, **headers) as client:
            response = client.get("/v1/models")
        assert response.status_code == 401 and "alice" not in response.text
    for headers in right:
        with http(server_with_keys, **headers) as client:
            assert client.get("/v1/models").status_code == 200
    client = openai.OpenAI(base_url=f"{server_with_keys.url}/v1", api_key="bob-key", max_retries=0)
    assert client.completions.create(model="tiny", prompt="hi").choices[0].text == "Hello"


def routes() -> list[tuple[str, str]]:
    """Method and path of every endpoint."""
    found, pending = [], [build_app(ServerState(ServerConfig(), None, engine_info()))]  # type: ignore[arg-type]
    while pending:
        for route in pending.pop().routes:
            if (included := getattr(route, "original_router", None)) is not None:
                pending.append(included)  # as newer releases of FastAPI hold them
            for method in getattr(route, "methods", None) or ():
                found.append((method, route.path.replace("{model:path}", "tiny")))  # type: ignore[attr-defined]
    assert len(found) > 50, "the walk misses endpoints"
    return sorted(found)


def test_every_endpoint_keeps_its_role(server_with_keys: RunningServer) -> None:
    """Also those that come later: an endpoint that is in no list needs a key."""
    with http(server_with_keys) as nobody, http(server_with_keys, "alice") as alice:
        for method, path in routes():
            if path == "/abort_request":
                continue
            status = nobody.request(method, path).status_code
            is_open = path in OPEN_PATHS or path.startswith(PAGE_FILES)
            assert (status != 401) == is_open, (method, path, status)
            is_admins = path in ADMIN_PATHS or path == "/metrics"
            status = alice.request(method, path).status_code
            assert (status == 403) == is_admins, (method, path, status)
            for variant in (path + "/", "/" + path, path.replace("_", "%5F"), path.upper()):
                assert nobody.request(method, variant).status_code in (401, 404) or is_open
    with http(server_with_keys, "root") as root:
        for path in ("/metrics", "/get_server_info", "/v1/cache/tree"):
            assert root.get(path).status_code == 200
        assert root.post("/flush_cache").status_code == 200


def test_only_an_admin_aborts_all(server_with_keys: RunningServer) -> None:
    for name, status in {"alice": 403, "root": 200}.items():
        with http(server_with_keys, name) as client:
            response = client.post("/abort_request", json={"abort_all": True})
        assert response.status_code == status


FORWARDED = [
    {"forwarded": "for=192.0.2.1"},
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-proto": "https"},
    {"x-real-ip": "127.0.0.1"},
    {"via": "1.1 proxy"},
]


def test_without_keys_an_admin_is_on_this_machine_and_not_behind_a_proxy(
    server: RunningServer,
) -> None:
    with server.http as client:
        assert client.get("/get_server_info").status_code == 200
        for headers in FORWARDED:
            refused = client.get("/get_server_info", headers=headers)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_only"
            assert client.post("/flush_cache", headers=headers).status_code == 403
            abort = client.post("/abort_request", json={"abort_all": True}, headers=headers)
            assert abort.status_code == 403
            assert client.get("/v1/models", headers=headers).status_code == 200
            tree = client.get("/v1/cache/tree", headers=headers).json()
            assert {node["text"] for n in tree["namespaces"] for node in n["children"]} == {None}


@pytest.mark.parametrize(
    ("peer", "status"),
    [("127.0.0.1", 200), ("127.8.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200),
     ("192.168.0.7", 403), ("::ffff:10.0.0.1", 403), ("fe80::1%eth0", 403), ("localhost", 403)],
)  # fmt: skip
def test_a_loopback_address_is_this_machine(peer: str, status: int) -> None:
    async def ask() -> int:
        app = build_app(ServerState(ServerConfig(), _Flushing(), engine_info()))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, client=(peer, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/flush_cache")).status_code

    assert asyncio.run(ask()) == status


class _Flushing:
    """An engine's client."""

    async def call(self, call: FlushCacheCall) -> int:
        return 0


# ------------------------------------------------------------ namespaces


def test_no_field_of_a_cache_root_is_taken_for_another() -> None:
    """Neither as a key of a dictionary nor in the hashes of its blocks."""
    values = ["", "a", "key:a", "\0", "\0a", "key:a\0", "a" * 64, "\x01\0\0\0a"]
    roots = [Tenant(cache_namespace=t).root(s, a) for t in values for s in values for a in values]
    assert len(set(roots)) == len({root.packed() for root in roots}) == len(values) ** 3


def test_an_id_in_use_by_another_key_is_neither_disclosed_nor_aborted(
    server_with_keys: RunningServer,
) -> None:
    server_with_keys.answer_endlessly()
    server_with_keys.scheduler.step_s = 0.02
    body = {"prompt": "hi", "max_tokens": 500, "rid": "mine"}
    with (
        ThreadPoolExecutor() as pool,
        http(server_with_keys, "alice") as alice,
        http(server_with_keys, "bob") as bob,
    ):
        running = pool.submit(alice.post, "/v1/completions", json=body)
        wait_until(lambda: server_with_keys.scheduler.num_running == 1)
        again = alice.post("/v1/completions", json=body)
        assert again.status_code == 400 and "in flight" in again.text
        other = bob.post("/v1/completions", json=body | {"max_tokens": 2})
        assert other.status_code == 200 and other.json()["id"] == "mine"
        assert bob.post("/abort_request", json={"rid": "mine"}).status_code == 200
        time.sleep(0.05)
        assert server_with_keys.scheduler.num_running == 1
        assert alice.post("/abort_request", json={"rid": "mine"}).status_code == 200
        assert running.result(20).json()["choices"][0]["finish_reason"] == "abort"


def test_a_kept_conversation_is_its_keys_own(server_with_keys: RunningServer) -> None:
    first = {"messages": [{"role": "user", "content": "hi"}], "keep": True}
    with http(server_with_keys, "bob") as bob, http(server_with_keys, "carol") as carol:
        kept = bob.post("/v1/chat/completions", json=first).json()
        after = {"messages": [], "continue_from": kept["id"]}
        assert bob.post("/v1/chat/completions", json=after).status_code == 200
        theirs = carol.post("/v1/chat/completions", json=after)
        unknown = carol.post("/v1/chat/completions", json=after | {"continue_from": "chatcmpl-0"})
    assert theirs.status_code == 404 and theirs.json() == unknown.json()
    with http(server_with_keys, **{"x-api-key": "bob-key"}) as bob:
        assert bob.post("/v1/chat/completions", json=after).status_code == 200


def test_the_tree_and_its_sessions_are_a_keys_own(server_with_keys: RunningServer) -> None:
    scheduler = server_with_keys.scheduler
    seen: dict[str, tuple[str | None, bool, str]] = {}
    for name in ("alice", "bob", "root"):
        scheduler.cache_calls.clear()
        with http(server_with_keys, name) as client:
            tree = client.get("/v1/cache/tree").json()
            client.post("/v1/cache/release", json={"session": "s", "cache_salt": "x"})
            client.post("/v1/cache/release", json={"lease": "l"})
        call, session, lease = scheduler.cache_calls
        assert isinstance(call, CacheTreeCall) and isinstance(session, ReleaseCacheCall)
        assert isinstance(lease, ReleaseCacheCall) and lease.tenant.name == name
        texts = {node["text"] for n in tree["namespaces"] for node in n["children"]}
        assert (texts == {None}) == (name != "root")
        seen[name] = call.namespace, session.session.endswith("s"), session.session
    assert seen["alice"][0] == "key:alice" and seen["bob"][0] == "group:friends"
    assert seen["root"][0] is None
    assert len({session for *_, session in seen.values()}) == 3


def test_a_user_sees_the_counters_of_its_key_alone(server_with_keys: RunningServer) -> None:
    with http(server_with_keys, "alice") as alice, http(server_with_keys, "root") as root:
        own, all_keys = (client.get("/v1/cache/stats").json() for client in (alice, root))
    assert own == dict.fromkeys(TenantStats.__struct_fields__, 2)
    assert all_keys["prompt_tokens"] == 100 and "pages" in all_keys


# ------------------------------------------------------------ limits


def limited(start_server: StartServer, folder: Path, **limits: object) -> RunningServer:
    server = start_server(api_keys=str(key_file(folder, **limits)))
    server.answer_endlessly()
    return server


def test_a_key_is_for_the_models_that_its_limits_name(
    start_server: StartServer, tmp_path: Path
) -> None:
    for models, status in (["other"], 403), (["other", "tiny"], 200):
        server = limited(start_server, tmp_path, models=models)
        with http(server, "alice") as alice:
            response = alice.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
            assert response.status_code == status, response.text
            if status == 403:
                assert "it may use other" in response.json()["error"]["message"]


def test_more_requests_in_flight_than_a_key_may_have_get_429(
    start_server: StartServer, tmp_path: Path
) -> None:
    limits = {"max_parallel_requests": 2, "max_tokens": 300, "max_cached_fraction": 0.25}
    server = limited(start_server, tmp_path, **limits)
    server.scheduler.step_s = 0.03
    body = {"prompt": "hi", "max_tokens": 300}
    with (
        ThreadPoolExecutor() as pool,
        http(server, "alice") as alice,
        http(server, "bob") as bob,
    ):
        batch = pool.submit(alice.post, "/v1/completions", json=body | {"prompt": ["hi"] * 5})
        single = pool.submit(alice.post, "/v1/completions", json=body | {"rid": "mine"})
        wait_until(lambda: server.scheduler.num_running == 3)
        refused = alice.post("/v1/completions", json=body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.scheduler.num_running == 3  # two prompts of the batch at a time
        tenants = [request.options.tenant for request in server.scheduler.requests]
        assert {tenant.max_cached_fraction for tenant in tenants} == {0.25}
        assert bob.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 200
        assert alice.post("/abort_request", json={"rid": "mine"}).status_code == 200
        assert single.result(20).status_code == 200
        wait_until(lambda: alice.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 200)  # fmt: skip
        too_long = alice.post("/v1/completions", json=body | {"max_tokens": 301})
        assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "max_tokens"
        native = alice.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 301}})  # fmt: skip
        assert native.json()["error"]["param"] == "sampling_params.max_new_tokens"
        server.scheduler.step_s = 0.0
        assert batch.result(60).status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answer = alice.post("/v1/chat/completions", json=chat).json()
        assert answer["usage"]["completion_tokens"] == 300  # of 512 tokens of context
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-key", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="at most 300"):
            client.chat.completions.create(model="tiny", messages=chat["messages"], max_tokens=301)  # type: ignore[arg-type]


def test_a_key_that_has_used_its_tokens_gets_429_before_anything_is_computed(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = limited(start_server, tmp_path, tokens_per_minute=50)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-key", max_retries=0)
    client.completions.create(model="tiny", prompt="hi", max_tokens=100)
    server.scheduler.requests.clear()
    with http(server, "alice") as alice:
        assert alice.get("/health_generate").status_code == 429
        assert alice.get("/v1/models").status_code == 200
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="hi", max_tokens=1)
    assert 60 <= int(refused.value.response.headers["retry-after"]) <= 120
    assert server.scheduler.requests == []


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def begin_and_end(use: KeyUse, limits: KeyLimits) -> int | None:
    """Seconds to wait; None: the request was let through."""
    try:
        use.begin(limits)
    except RequestError as error:
        return error.retry_after_s
    use.end()
    return None


def test_rates_refill_evenly_and_a_debt_is_paid_back_first() -> None:
    clock = Clock()
    use, limits = KeyUse(clock), KeyLimits(requests_per_minute=3)
    assert [begin_and_end(use, limits) for _ in range(4)] == [None, None, None, 20]
    clock.now += 20
    assert [begin_and_end(use, limits) for _ in range(2)] == [None, 20]
    use, limits = KeyUse(clock), KeyLimits(tokens_per_minute=60)
    assert begin_and_end(use, limits) is None
    use.count_tokens(150)
    assert begin_and_end(use, limits) == 91
    clock.now += 90
    assert begin_and_end(use, limits) == 1
    clock.now += 1
    assert begin_and_end(use, limits) is None
    assert begin_and_end(use, KeyLimits()) is None and use.in_flight == 0


def test_a_keys_own_limits_come_before_those_of_the_file() -> None:
    own = KeyLimits(max_tokens=5).over(KeyLimits(max_tokens=9, requests_per_minute=7))
    assert own == KeyLimits(max_tokens=5, requests_per_minute=7)


def test_a_default_length_is_within_the_keys_limit(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = limited(start_server, tmp_path, max_tokens=5)
    server.answer_endlessly()
    with server.http as http:
        http.headers["authorization"] = "Bearer alice-key"
        completion = http.post("/v1/completions", json={"prompt": "hi"}).json()
        native = http.post("/generate", json={"text": "hi"}).json()
    assert completion["usage"]["completion_tokens"] == 5
    assert native["meta_info"]["completion_tokens"] == 5
