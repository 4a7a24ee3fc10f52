"""The whole server on a GPU, under 64 requests at a time."""

import asyncio
from typing import Any

import httpx
import pytest

from bench.gpu.shapes import QWEN3_06B
from bench.local_server import local_server
from tests.near_ties import SampledAnswer, gap_at_first_difference

CONCURRENT = 64
REQUESTS = 192
LARGEST_ROUNDING = 0.5
"""Of the sum of a logit and its noise. Another draw is apart by several."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = QWEN3_06B.write_checkpoint(tmp_path_factory.mktemp("qwen3"))
    flags = ["--load-format", "dummy", "--context-length", "4096", "--mem-fraction-static", "0.3"]
    with local_server(str(folder), *flags) as url:
        yield url


def body(index: int) -> dict[str, Any]:
    """Prompts that share a beginning, of many lengths, greedy and sampled, some held to a
    schema."""
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": index},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": index},
        {"temperature": 1.0, "seed": index, "presence_penalty": 0.5, "logprobs": 2},
    ]
    prompt = [1000 + position % 50 for position in range(100)]
    prompt += [2000 + index] * (1 + 37 * index % 400)
    settings = {"prompt": prompt, "max_tokens": 16 + index % 64, "ignore_eos": True}
    return {"model": "qwen3", **settings, **sampling[index % len(sampling)]}


async def ask_all(url: str) -> list[dict[str, Any]]:
    places = asyncio.Semaphore(CONCURRENT)
    limits = httpx.Limits(max_connections=CONCURRENT)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]

        async def one(index: int) -> dict[str, Any]:
            async with places:
                request = {**body(index), "model": model}
                response = await client.post(f"{url}/v1/completions", json=request)
                assert response.status_code == 200, response.text
                return response.json()

        return await asyncio.gather(*(one(index) for index in range(REQUESTS)))


def test_every_answer_has_its_length_and_no_page_is_lost(url: str) -> None:
    answers = asyncio.run(ask_all(url))
    for index, answer in enumerate(answers):
        assert answer["usage"]["completion_tokens"] == body(index)["max_tokens"]
    info = httpx.get(f"{url}/get_server_info", params={"check_invariants": "true"}, timeout=30)
    assert info.status_code == 200, info.text


def test_a_seed_gives_one_answer_alone_and_among_others(url: str) -> None:
    """But for tokens that tie within the rounding of logits, which depends on the size of a
    batch."""
    seed = 1
    request = {**body(seed), "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    assert request["temperature"] == 1.0 and request["seed"] == seed

    async def twice() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with httpx.AsyncClient(timeout=120) as client:
            model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
            named = {**request, "model": model}
            alone = (await client.post(f"{url}/v1/completions", json=named)).json()
            crowd = [client.post(f"{url}/v1/completions", json=named) for _ in range(16)]
            return alone, [response.json() for response in await asyncio.gather(*crowd)]

    alone, crowd = asyncio.run(twice())
    for answer in crowd:
        gap = gap_at_first_difference(
            sampled(alone), sampled(answer), seed=seed, position=len(request["prompt"])
        )
        assert gap < LARGEST_ROUNDING


def sampled(answer: dict[str, Any]) -> SampledAnswer:
    (choice,) = answer["choices"]
    return SampledAnswer(choice["token_ids"], choice["logprobs"]["token_logprobs"])
