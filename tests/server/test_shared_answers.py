"""Equal requests at once are one computation: streams, keys, which are read again at a signal, clients
that leave, and a worker that dies."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixrt.base.api_keys import digest_of, new_key
from tests.servers import SHARES_ANSWERS, Server, serving

KEYS = ("anna", "bert")
MESSAGES = [{"role": "user", "content": "The owner of Vidur is Noval. What is the owner of Vidur?"}]
BODY: dict[str, Any] = {
    "messages": MESSAGES,
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
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
    bodies: list[dict[str, Any]] = [{"seed": seed} for seed in range(100, 120)]
    bodies += [{"top_p": 0.5 + one / 64} for one in range(20)]
    bodies += [{"messages": [{"role": "user", "content": f"Hello {one}"}]} for one in range(20)]
    for most in range(4):
        schema = {**SCHEMA, "properties": {"a": {"type": "integer", "maximum": 100 + most}}}
        bodies.append({"guided_json": schema, "ignore_eos": False})
    return [{**BODY, "max_tokens": 8, **one} for one in bodies]


def test_64_equal_requests_of_two_keys_are_two_computations(server: Server) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    with client_of(server, "anna") as anna, client_of(server, "bert") as bert:
        alone, _ = ask(anna, {**BODY, "cache": {"answers": False}})
        before = generated(anna)
        with ThreadPoolExecutor(64) as pool:
            jobs = [
                pool.submit(ask, client, {**BODY, **(stream if number % 2 else {})})
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
    with client_of(server, "anna") as anna:
        alone = [ask(anna, {**body, "cache": {"answers": False}})[0] for body in bodies]
        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(lambda body: ask(anna, body), bodies))
        assert [text for text, _ in found] == alone
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
