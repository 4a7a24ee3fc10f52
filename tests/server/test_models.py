"""Three models in the memory of two. `make torture-models` has 200 requests and kills every kind of
process."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from tests.checkpoints import make_tokenizer
from tests.servers import Server, samples
from tests.servers.fake_hub import FakeHub
from tests.servers.several_models import (
    MEMORY_MB,
    NAMES,
    body_for,
    engine_processes,
    memory_mb,
    streamed,
    three_models,
)
from tests.torture.leaks import module_of, wait_for

PATIENCE_S = 180


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Its hub has a fourth model."""
    folder = make_tokenizer(checkpoint("llama"))
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with FakeHub(tiny=files) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        with three_models(checkpoint, "--log-level", "info") as server:
            yield server


def states(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in client.get("/v1/models").json()["data"]}


def test_three_models_in_the_memory_of_two(server: Server) -> None:
    """In the order in which a user would meet it: one server, since each load costs seconds."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        only_the_first_is_loaded(client)
        asyncio.run(no_answer_is_lost_at_a_death_while_another_model_is_loaded(server))
        assert states(client) == {"llama": "loaded", "qwen3": "loaded", "olmo2": "unloaded"}
        a_request_for_the_third_unloads_the_one_that_was_used_longest_ago(client)
        assert memory_mb(server) <= MEMORY_MB
        metrics_are_of_each_model(client)
        what_does_not_generate_loads_nothing(client)
        keep_alive_zero_unloads(client, server)
        a_pull_adds_a_model(client)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    assert not list(server.temp_dir.iterdir())


def only_the_first_is_loaded(client: httpx.Client) -> None:
    assert states(client) == {"llama": "loaded", "qwen3": "unloaded", "olmo2": "unloaded"}
    assert [model["name"] for model in client.get("/api/tags").json()["models"]] == [*NAMES]
    assert [model["name"] for model in client.get("/api/ps").json()["models"]] == ["llama"]
    assert client.get("/ready").status_code == 200
    refused = client.post("/v1/chat/completions", json={"model": "gpt-4", "messages": []})
    assert refused.status_code == 404
    assert "this server has llama, qwen3, olmo2" in refused.json()["error"]["message"]
    late = client.post("/v1/chat/completions", json={**body_for("qwen3", 1), "timeout": 0.01})
    assert late.status_code == 503 and "longer timeout" in late.json()["error"]["message"]


async def no_answer_is_lost_at_a_death_while_another_model_is_loaded(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        length = 400
        expected = await streamed(client, body_for("llama", 1, length=length))
        tokenizers = [one for one in engine_processes(server) if module_of(one) == "tokenizer"]
        answers = [
            asyncio.create_task(streamed(client, body_for(name, 1, length=length)))
            for name in ("llama", "llama", "qwen3")
        ]
        await asyncio.sleep(0.1)
        assert not answers[0].done(), "the death would come too late"
        tokenizers[0].send_signal(signal.SIGKILL)
        found = await asyncio.gather(*answers)
        assert found[0] == found[1] == expected != found[2]


def a_request_for_the_third_unloads_the_one_that_was_used_longest_ago(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json={**body_for("llama", 2), "stream": False})
    generated = client.post(  # Ollama's form, with its tag
        "/api/generate",
        json={
            "model": "olmo2:latest",
            "prompt": "x",
            "stream": False,
            "options": {"num_predict": 2},
        },
    )
    assert generated.status_code == 200 and generated.json()["model"] == "olmo2"
    assert states(client) == {"llama": "loaded", "qwen3": "unloaded", "olmo2": "loaded"}


def metrics_are_of_each_model(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    for name in NAMES:
        assert f'radixrt_answers_total{{model_name="{name}",outcome="length"}}' in text
    assert 'radixrt_running_requests{model_name="olmo2"}' in text
    assert 'radixrt_running_requests{model_name="qwen3"}' not in text
    assert text.count("# TYPE radixrt_answers_total") == 1 and samples(text)


def what_does_not_generate_loads_nothing(client: httpx.Client) -> None:
    for path, status in (("/model_info", 200), ("/v1/live", 503), ("/server_info", 503)):
        response = client.get(path, params={"model": "qwen3"})
        assert response.status_code == status, (path, response.text)
    assert "qwen3 is not loaded" in response.json()["error"]["message"]
    assert client.post("/abort_request", json={"rid": "none"}).json() == {"success": True}
    assert client.get("/model_info").json()["served_model_name"] == "llama"
    assert states(client)["qwen3"] == "unloaded"


def keep_alive_zero_unloads(client: httpx.Client, server: Server) -> None:
    stopped = client.post("/api/generate", json={"model": "olmo2", "keep_alive": 0})
    assert stopped.json()["done_reason"] == "unload"
    wait_for(lambda: states(client)["olmo2"] == "unloaded", PATIENCE_S, "it is loaded")
    wait_for(lambda: len(engine_processes(server)) == 3, PATIENCE_S, "it runs")
    assert any("olmo2/worker" in line for line in server.log), "its loading is logged"
    before = len(server.log)
    client.post("/api/generate", json={"model": "olmo2", "keep_alive": 0})
    news = [line for line in server.log[before:] if "olmo2/" in line]
    assert not news, "a model is loaded only to be unloaded"


def a_pull_adds_a_model(client: httpx.Client) -> None:
    pulled = client.post("/api/pull", json={"model": "maker/tiny"})
    first, *progress, last = map(orjson.loads, pulled.text.splitlines())
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert progress and progress[-1]["completed"] == progress[-1]["total"] > 10_000
    assert states(client)["maker/tiny"] == "unloaded"
    again = client.post("/api/pull", json={"name": "maker/tiny:latest", "stream": False})
    assert again.json() == {"status": "success"}
    refused = client.post("/api/pull", json={"model": "maker/none", "stream": False})
    assert (
        refused.status_code == 400
        and "maker/none does not exist on the hub" in refused.json()["error"]
    )
