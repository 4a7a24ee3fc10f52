"""The stream of readings, and what an admin may do with a node of the tree."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from radixrt.api import metrics
from radixrt.api.metrics import RecentCounters
from radixrt.api.native.live import MAX_STREAMS
from radixrt.base.api_keys import new_key
from radixrt.kv.reading import Rates, Reading
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import CacheTreeCall, PinCall, ReleaseCacheCall
from radixrt.messages.ids import num_ids
from radixrt.messages.stats import RequestStats
from tests.api.conftest import RunningServer, StartServer, wait_until


@pytest.fixture(scope="module")
def keyed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with the keys of a user and of an admin: a function that makes their clients."""
    keys = {role: new_key(name, role) for name, role in {"alice": "user", "root": "admin"}.items()}
    file: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_bytes(msgspec.json.encode({"keys": [entry for _, entry in keys.values()]}))
    server = start_server(api_keys=str(file))

    def client(role: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {keys[role][0]}"}
        return httpx.Client(base_url=server.url, headers=headers, timeout=20)

    client.server = server  # type: ignore[attr-defined]
    yield client


def readings(response: httpx.Response, number: int) -> list[Reading]:
    found = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            found.append(msgspec.json.decode(line[6:], type=Reading))
            if len(found) == number:
                return found
    raise AssertionError("the stream has ended")


def test_a_stream_tells_readings_until_the_client_leaves(server: RunningServer) -> None:
    with server.http as http, http.stream("GET", "/v1/live?stream=true&nodes=9&below=7") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        first, second = readings(stream, 2)
        assert second.time_s - first.time_s >= 0.9
    assert first.engine is not None and first.engine.cache.hit_rate == 0.4 and first.is_admin
    calls = [call for call in server.scheduler.cache_calls if isinstance(call, CacheTreeCall)]
    assert (calls[0].most, calls[0].below, calls[0].namespace) == (9, 7, None)
    assert len(calls) == 2


def test_one_reading_has_the_latencies_that_metrics_has(server: RunningServer) -> None:
    server.openai.completions.create(model="tiny", prompt="hi")
    with server.http as http:
        metrics, reading = http.get("/metrics").text, http.get("/v1/live").json()
    count = sum(reading["engine"]["requests"]["ttft"]["counts"])
    assert count > 0
    told = re.search(r"^radixrt_time_to_first_token_seconds_count\S* (\S+)$", metrics, re.M)
    assert told and float(told[1]) == count
    assert reading["model"] == "tiny"


def test_rates_are_differences_over_time(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.http as http:
        reading = msgspec.json.decode(http.get("/v1/live").content, type=Reading)
    assert reading.engine is not None
    first, requests, now = reading.engine.stats, RequestStats(), 100.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    counters = RecentCounters(requests)
    counters.take(first)
    assert counters.rates() == Rates()
    now += 4
    for seconds in (0.06, 0.06, 0.06, 0.9):
        requests.ttft.observe(seconds)
    later = msgspec.structs.replace(
        first,
        prompt_tokens=first.prompt_tokens + 200,
        cached_tokens=first.cached_tokens + 150,
        output_tokens=first.output_tokens + 20,
        evicted_pages=first.evicted_pages + 12,
    )
    counters.take(later)
    rates = counters.rates()
    assert (rates.seconds, rates.hit_rate, rates.evicted_pages_per_s) == (4, 150 / 200, 3)
    assert rates.generated_tokens_per_s == 5
    assert (rates.cached_tokens_per_s, rates.computed_tokens_per_s) == (150 / 4, 50 / 4)
    assert rates.itl is None and rates.ttft is not None
    assert 0.05 < rates.ttft.p50 < 0.1 and 0.5 < rates.ttft.p90 < 1
    now += 30  # nobody has watched
    counters.take(later)
    assert counters.rates() == Rates() and counters.rates(60).seconds == 30
    now += 1
    counters.take(msgspec.structs.replace(first, steps=first.steps - 1))
    assert counters.rates() == Rates(), "a new engine counts from the beginning"


def test_a_user_reads_its_own_namespace_without_texts(keyed: Any) -> None:
    keyed.server.scheduler.cache_calls.clear()
    with keyed("user") as http:
        own = http.get("/v1/live").json()
        assert own["is_admin"] is False and "engine" not in own and own["own"]["leases"] == 2
        assert '"text":null' in json.dumps(own, separators=(",", ":")) and "hello" not in own
        for refused in (
            http.get("/v1/cache/tree/7"),
            http.post("/v1/cache/pin", json={"node": 7}),
            http.post("/v1/cache/release", json={"node": 7}),
        ):
            assert refused.status_code == 403
    (call,) = keyed.server.scheduler.cache_calls
    assert call.namespace == "key:alice" and not call.with_texts
    with keyed("admin") as http:
        assert http.get("/v1/live").json()["engine"]["stats"]["pages_total"] == 128


def test_watchers_are_bounded(start_server: StartServer) -> None:
    server = start_server()
    with server.http as http, contextlib.ExitStack() as watchers:
        for _ in range(MAX_STREAMS):
            watcher = watchers.enter_context(http.stream("GET", "/v1/live?stream=true"))
            assert watcher.status_code == 200
        assert not _can_watch(http)
        watchers.close()
        wait_until(lambda: _can_watch(http))


def test_users_that_watch_keep_no_admin_out(keyed: Any) -> None:
    with keyed("user") as users, keyed("admin") as admin, contextlib.ExitStack() as watchers:
        for _ in range(MAX_STREAMS):
            watchers.enter_context(users.stream("GET", "/v1/live?stream=true"))
        assert users.get("/v1/live?stream=true").status_code == 503
        assert _can_watch(admin)


def test_a_probe_of_the_stream_watches_nothing(server: RunningServer) -> None:
    with server.http as http:
        for _ in range(2):  # on one connection
            probe = http.head("/v1/live?stream=true", timeout=3)
            assert (probe.status_code, probe.content) == (200, b"")
            assert probe.headers["content-type"].startswith("text/event-stream")


def _can_watch(http: httpx.Client) -> bool:
    with http.stream("GET", "/v1/live?stream=true") as stream:
        return stream.status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        "interval=0.1",
        "nodes=0",
        "nodes=5000",
        "below=x",
        "below=-1",
        f"below={1 << 70}",
        "depth=17",
    ],
)
def test_readings_out_of_bounds_are_refused(server: RunningServer, query: str) -> None:
    with server.http as http:
        assert http.get(f"/v1/live?{query}").status_code == 400


def test_an_admin_sees_a_node_and_none_of_its_secrets(keyed: Any) -> None:
    with keyed("admin") as http:
        node, salted = http.get("/v1/cache/tree/7").json(), http.get("/v1/cache/tree/8").json()
        assert http.get("/v1/cache/tree/9").status_code == 404
    text = keyed.server.vocabulary.decode([300, 301] * 8)
    assert node["text"] == node["text_before"] == text
    assert (node["prefix_tokens"], node["num_tokens"], node["uses"]) == (32, 16, 3)
    assert node["leases"] == [{"tenant": "alice", "expires_in_s": 60.0}]
    assert salted["text"] is None and salted["text_before"] is None
    assert "secret" not in str(node) + str(salted)


def test_an_admin_pins_a_node_where_it_is_and_releases_all_its_leases(keyed: Any) -> None:
    calls = keyed.server.scheduler.cache_calls
    with keyed("admin") as http:
        calls.clear()
        pinned = http.post("/v1/cache/pin", json={"node": 7, "ttl_s": 60}).json()
        assert (pinned["lease"], pinned["pinned_tokens"], pinned["expires_in_s"]) == (
            "lease-1",
            32,
            60,
        )
        (pin,) = (call for call in calls if isinstance(call, PinCall))
        assert (pin.root, num_ids(pin.token_ids)) == (CacheRoot("key:alice"), 32)
        assert pin.tenant.name == "root"
        assert http.post("/v1/cache/release", json={"node": 7}).json() == {"released_tokens": 32}
        release = calls[-1]
        assert isinstance(release, ReleaseCacheCall)
        assert (release.lease, release.tenant.name) == ("secret-lease", "alice")


def test_a_node_stands_alone(server: RunningServer) -> None:
    with server.http as http:
        for path, body in (
            ("/v1/cache/pin", {"node": 7, "prompt": "hi"}),
            ("/v1/cache/release", {"node": 7, "lease": "x"}),
            ("/v1/cache/pin", {"node": "7"}),
            ("/v1/cache/pin", {"node": 1 << 70}),
            ("/v1/cache/release", {"node": -1}),
        ):
            refused = http.post(path, json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"], body
        assert http.post("/v1/cache/pin", json={"node": 99}).status_code == 404
