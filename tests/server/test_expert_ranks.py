"""A server whose ranks hold whole experts: its answers, its metrics, and the death of a rank."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from radixrt.models.loader import load_model
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.models.harness import Harness
from tests.server.test_takeover import (
    Stream,
    commands_of,
    is_alive,
    wait_until_ready,
    wait_until_unready,
)
from tests.servers import Server, samples, serving

PROMPT = [5, 9, 100, 31, 7]
LENGTH = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "qwen3_moe"
    return make_tokenizer(make_checkpoint("qwen3_moe", folder, mlp_only_layers=[]))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    flags = ("--tp", "2", "--enable-expert-parallel", "--expert-metrics", "--dtype", "float32")
    with serving(model, *flags) as server:
        yield server


def answer(server: Server, length: int) -> list[int]:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}}  # fmt: skip
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    return response.json()["output_ids"]


def expert_metrics(server: Server) -> dict:
    values = samples(httpx.get(f"{server.url}/metrics").text)
    return {name: value for name, value in values.items() if "_expert_" in name[0]}


def test_the_tokens_are_those_of_one_rank(server: Server, model: Path) -> None:
    (expected,) = Harness(load_model(model), 16).generate([PROMPT], 40)
    assert answer(server, 40) == expected


def test_answers_go_on_when_a_rank_dies(server: Server) -> None:
    undisturbed = answer(server, LENGTH)
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    stream = Stream(server, {**body, "stream": True})
    ranks = commands_of(server, "worker")
    (second,) = (
        process for process, line in ranks.items() if line[line.index("--rank") + 1] == "1"
    )
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stream.run)
        stream.wait_for_events()
        second.kill()
        wait_until_unready(server)
        running.result()
    assert not stream.error and stream.texts[0] == whole.json()["choices"][0]["text"]
    wait_until_ready(server)
    assert answer(server, LENGTH) == undisturbed
    assert not any(map(is_alive, ranks))


def test_metrics_show_the_load_of_the_experts(server: Server) -> None:
    answer(server, 30)
    deadline = time.monotonic() + 30
    while not (loads := expert_metrics(server)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tokens = [loads["radixrt_expert_tokens_total", (("expert", str(e)),)] for e in range(6)]
    assert sum(tokens) > 0
    for layer in range(3):
        assert 1 <= loads["radixrt_expert_imbalance", (("layer", str(layer)),)] <= 6
