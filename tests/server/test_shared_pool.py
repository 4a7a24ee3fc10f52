"""A KV pool that outlives its worker: what was computed before a death is not computed again, and
has the bits of a cold server."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.servers import Server, samples, serving
from tests.torture.leaks import module_of

DOCUMENTS = [[(11 * d + 3 * i) % 400 + 5 for i in range(150 + 40 * d)] for d in range(4)]


def generate(server: Server, prompts: Any, num_tokens: int = 20) -> list[dict[str, Any]]:
    sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def bits(answers: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities."""
    return [(one["output_ids"], [p[0] for p in one["meta_info"]["output_token_logprobs"]]) for one in answers]  # fmt: skip


def stats(server: Server) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/cache/stats", timeout=60).json()


def generated(server: Server) -> float:
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    return samples(metrics)["radixrt_generated_tokens_total", ()]


def kill(server: Server, module: str) -> None:
    (victim,) = [one for one in server.family() if module_of(one) == module]
    victim.kill()


@pytest.fixture(scope="module")
def cold() -> Iterator[Server]:
    with serving("demo", "--shared-kv-pool", "off", "--speculation", "off") as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--shared-kv-pool", "on") as server:
        yield server


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_death_loses_no_page(server: Server, cold: Server, victim: str) -> None:
    right = bits(generate(cold, DOCUMENTS))
    assert bits(generate(server, DOCUMENTS)) == right
    kill(server, victim)
    again = generate(server, DOCUMENTS)
    assert bits(again) == right
    cached = [answer["meta_info"]["cached_tokens"] for answer in again]
    assert cached == [16 * ((len(document) - 1) // 16) for document in DOCUMENTS]
    assert server.info(check_invariants=True)


def test_answers_go_on_without_their_prompts_being_computed_again(
    server: Server, cold: Server
) -> None:
    prompts = [[7 + number, *document, *document] for number, document in enumerate(DOCUMENTS)]
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.extend(generate(server, prompts, 600)))
    before = generated(server)
    asking.start()
    while generated(server) < before + 400:
        pass
    kill(server, "worker")
    asking.join()
    assert bits(answers) == bits(generate(cold, prompts, 600))
    whole_pages = sum(16 * (len(prompt) // 16) for prompt in prompts)
    assert stats(server)["cached_tokens"] >= whole_pages, "of the new engine alone"


def test_a_second_death_without_a_token_begins_with_an_empty_pool(server: Server) -> None:
    """What is kept could be the cause of both."""
    generate(server, DOCUMENTS)
    kill(server, "worker")
    httpx.get(f"{server.url}/v1/cache/stats", timeout=60)
    kill(server, "worker")
    (answer,) = generate(server, [DOCUMENTS[0]])
    assert answer["meta_info"]["cached_tokens"] == 0
