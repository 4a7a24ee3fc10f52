"""Equal requests at once are one computation: streams, keys, which are read again at a signal,
replicas, clients that leave, workers that die, and a replica that drains."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixrt.base.api_keys import digest_of, new_key
from tests.servers import SHARES_ANSWERS, Server, samples, serving

KEYS = ("anna", "bert")
MESSAGES = [{"role": "user", "content": "The owner of Vidur is Noval. What is the owner of Vidur?"}]
BODY: dict[str, Any] = {
    "messages": MESSAGES,
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [
        {"name": name, "hash": digest_of(name), "role": "admin", "cache_group": "shared"}
        for name in KEYS
    ]
    file.write_text(json.dumps({"keys": entries}))
    return file


@pytest.fixture(scope="module")
def server(key_file: Path) -> Iterator[Server]:
    flags = ("--api-keys", str(key_file), "--log-level", "warning", SHARES_ANSWERS)
    with serving("demo", *flags) as one:
        yield one


@pytest.fixture(scope="module")
def replicas(key_file: Path) -> Iterator[Server]:
    """Two of them."""
    with serving("demo", "--dp", "2", "--api-keys", str(key_file), SHARES_ANSWERS) as one:
        yield one


def client_of(server: Server, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def generated(client: httpx.Client) -> int:
    return client.get("/get_server_info").json()["stats"]["output_tokens"]


def ask(client: httpx.Client, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its usage; streamed or whole."""
    if not body.get("stream"):
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
    text, usage = "", {}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(one["delta"].get("content") or "" for one in event["choices"])
                usage = event.get("usage") or usage
    return text, usage


def nearly_equal() -> list[dict[str, Any]]:
    """Bodies that differ in a seed, a parameter, a token, or a keyword of a schema."""
    bodies: list[dict[str, Any]] = [{"seed": seed} for seed in range(100, 108)]
    bodies += [{"top_p": 0.5 + one / 64} for one in range(8)]
    bodies += [{"messages": [{"role": "user", "content": f"Hello {one}"}]} for one in range(8)]
    for most in range(4):
        schema = {**SCHEMA, "properties": {"a": {"type": "integer", "maximum": 100 + most}}}
        bodies.append({"guided_json": schema, "ignore_eos": False})
    return [{**BODY, "max_tokens": 8, **one} for one in bodies]


@pytest.mark.parametrize("kind", ["server", "replicas"])
def test_64_equal_requests_of_two_keys_are_two_computations(
    request: pytest.FixtureRequest, kind: str
) -> None:
    server: Server = request.getfixturevalue(kind)
    with client_of(server, "anna") as anna, client_of(server, "bert") as bert:
        alone, _ = ask(anna, {**BODY, "cache": {"answers": False}})
        before = generated(anna)
        with ThreadPoolExecutor(64) as pool:
            jobs = [
                pool.submit(ask, client, {**BODY, **(STREAM if number % 2 else {})})
                for number in range(32)
                for client in (anna, bert)
            ]
            answers = [job.result() for job in jobs]
        assert {text for text, _ in answers} == {alone}
        assert generated(anna) - before == 2 * 24
        replayed = sum(usage.get("replayed_tokens", 0) for _, usage in answers)
        assert replayed == 62 * 24


def test_nearly_equal_requests_are_computed_each_and_answer_as_alone(server: Server) -> None:
    bodies = nearly_equal()
    with client_of(server, "anna") as anna, client_of(server, "bert") as bert:
        alone = [ask(anna, {**body, "cache": {"answers": False}})[0] for body in bodies]
        asked = [(anna, {**body, **(STREAM if n % 2 else {})}) for n, body in enumerate(bodies)]
        asked += [(bert, body) for _, body in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda one: ask(*one), asked))
        assert [text for text, _ in found] == 2 * alone
        assert not any("replayed_tokens" in usage for _, usage in found)
        again = [ask(anna, body) for body in bodies]
        assert [text for text, _ in again] == alone
        assert all(usage["replayed_tokens"] == usage["completion_tokens"] for _, usage in again)


def test_what_says_how_it_was_computed_is_computed(server: Server) -> None:
    with client_of(server, "anna") as anna:
        ask(anna, BODY)
        assert ask(anna, BODY)[1]["replayed_tokens"] == 24
        computed = (
            {"logprobs": True}, {"kept_mass": True}, {"prompt_logprobs": 0}, {"cache": {"answers": False}},
            {"cache": {"explain": True}}, {"seed": None}, {"cache_salt": "other"},
        )  # fmt: skip
        for change in computed:
            _, usage = ask(anna, {**BODY, **change})
            assert "replayed_tokens" not in usage, change
        _, longer = ask(anna, {**BODY, "max_tokens": 30})
        assert longer["completion_tokens"] == 30
        assert longer["replayed_tokens"] == 24


def test_others_go_on_when_clients_leave_and_the_worker_dies(server: Server) -> None:
    body = {**BODY, "max_tokens": 400, "seed": 99, "stream": True}
    with client_of(server, "anna") as anna, ThreadPoolExecutor(8) as pool:
        alone, _ = ask(anna, {**body, "cache": {"answers": False}})
        with anna.stream("POST", "/v1/chat/completions", json=body) as first:
            lines = first.iter_lines()
            for _ in range(6):
                next(lines)
            jobs = [pool.submit(ask, anna, body) for _ in range(6)]
            for _ in range(20):
                next(lines)
        (worker,) = [one for one in server.family() if "radixrt.worker" in one.cmdline()]
        os.kill(worker.pid, signal.SIGKILL)
        assert {job.result()[0] for job in jobs} == {alone}
        assert server.info  # it serves on
        stats = anna.get("/get_server_info", params={"check_invariants": "true"})
        assert stats.status_code == 200, stats.text


def running_by_replica(client: httpx.Client) -> dict[str, float]:
    """The sequences in slots."""
    metrics = samples(client.get("/metrics").text)
    return {
        dict(labels)["replica"]: count
        for (name, labels), count in metrics.items()
        if name == "radixrt_running_requests"
    }


def kill_worker(server: Server, client: httpx.Client, replica: str) -> None:
    for process in server.family():
        line = process.cmdline()
        if "radixrt.worker" in line and line[line.index("--replica") + 1] == replica:
            os.kill(process.pid, signal.SIGKILL)


def drain(server: Server, client: httpx.Client, replica: str) -> None:
    answer = client.post("/v1/replicas/drain", json={"replica": int(replica)})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("end", [kill_worker, drain])
def test_shared_answers_go_on_when_their_replica_dies_or_drains(
    replicas: Server, end: Callable[[Server, httpx.Client, str], None]
) -> None:
    body = {**BODY, **STREAM, "max_tokens": 400, "seed": 98 + (end is drain)}
    with client_of(replicas, "anna") as anna, client_of(replicas, "bert") as bert:
        alone, _ = ask(anna, {**body, "cache": {"answers": False}})
        with (
            ThreadPoolExecutor(8) as pool,
            anna.stream("POST", "/v1/chat/completions", json=body) as first,
        ):
            lines = first.iter_lines()
            for _ in range(6):
                next(lines)
            jobs = [pool.submit(ask, client, body) for client in (anna, bert) for _ in range(3)]
            for _ in range(20):
                next(lines)
            running = running_by_replica(anna)
            end(replicas, anna, max(running, key=running.__getitem__))
            assert {job.result()[0] for job in jobs} == {alone}
            assert [line for line in lines if line][-1] == "data: [DONE]"
        stats = anna.get("/get_server_info", params={"check_invariants": "true"})
        assert stats.status_code == 200, stats.text
        deadline = time.monotonic() + 60
        while end is kill_worker and len(running_by_replica(anna)) < 2:  # the next case drains one
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_sighup_reads_the_keys_again_and_ends_nothing(server: Server, key_file: Path) -> None:
    """The last test of the server, whose keys are other ones then."""

    def status(key: str) -> int:
        with client_of(server, key) as client:
            return client.get("/v1/models").status_code

    new, entry = new_key("second", "user")
    assert status("anna") == 200 and status(new) == 401
    key_file.write_text(json.dumps({"keys": [{"name": entry.name, "hash": entry.hash}]}))
    server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while status(new) == 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert status("anna") == 401
