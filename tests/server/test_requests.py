"""The whole server through its front door, with the clients that people use."""

import asyncio
import http.client
import random
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch

from tests.server.test_takeover import process_of, until
from tests.servers import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_answers_are_those_of_transformers(client: openai.OpenAI, served_checkpoint: Path) -> None:
    """Template, tokenizer, engine and detokenizer together."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(served_checkpoint, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**ids, max_new_tokens=32, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    expected = tokenizer.decode(output, skip_special_tokens=True)
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=32, temperature=0
    )
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None and answer.usage.prompt_tokens == ids["input_ids"].shape[1]


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    settings = dict(model="tiny", messages=QUESTION, max_tokens=40, temperature=0)
    whole = client.chat.completions.create(**settings).choices[0].message.content  # type: ignore[call-overload]
    stream = client.chat.completions.create(**settings, stream=True)  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole and len(pieces) > 5


def test_second_question_on_a_document_is_answered_from_the_cache(client: openai.OpenAI) -> None:
    document = "One document, many questions. " * 12
    cached = []
    for question in ("What?", "Why?", "Who?"):
        answer = client.completions.create(model="tiny", prompt=document + question, max_tokens=4)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(
            (answer.usage.prompt_tokens_details.cached_tokens or 0) / answer.usage.prompt_tokens
        )
    assert cached[0] < 0.5 and min(cached[1:]) > 0.9


def test_a_chat_goes_on_from_the_tokens_that_were_generated(
    client: openai.OpenAI, served_checkpoint: Path
) -> None:
    """A model may spell a word in other tokens than its tokenizer would: their KV is what the cache
    holds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served_checkpoint)
    extra = {"return_token_ids": True, "guided_regex": "[a-z ]{24}", "cache_salt": "a chat"}
    messages: list = [*QUESTION]
    before: list[int] = []
    spelled_otherwise = 0
    for turn in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=40,
            temperature=1,
            seed=turn,
            extra_body=extra,
        )
        choice, details = answer.choices[0], answer.usage.prompt_tokens_details
        prompt_ids, ids = answer.prompt_token_ids, choice.token_ids
        ids = ids[: -1 if ids[-1] == tokenizer.eos_token_id else None]
        assert prompt_ids[: len(before)] == before
        assert tokenizer.decode(prompt_ids) == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert details.cached_tokens >= (len(before) - 1) // 4 * 4, "but for the last page"
        spelled_otherwise += tokenizer.encode(choice.message.content) != ids
        before = prompt_ids + ids
        messages += [{"role": "assistant", "content": choice.message.content}, *QUESTION]
    assert spelled_otherwise, "or this shows nothing"
    other = {**extra, "cache_salt": "another chat"}
    again = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, extra_body=other
    )
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert again.prompt_token_ids == expected


def test_n_answers_share_one_prompt(client: openai.OpenAI, server: Server) -> None:
    before = server.info()
    answer = client.completions.create(
        model="tiny",
        prompt="Something entirely new to everybody here: 12345",
        n=4,
        max_tokens=8,
        temperature=1,
        seed=5,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1
    after = server.info()
    computed = [
        info["stats"]["prompt_tokens"] - info["stats"]["cached_tokens"] for info in (before, after)
    ]
    assert answer.usage is not None
    assert computed[1] - computed[0] <= answer.usage.prompt_tokens + 4 * 4


def test_sixty_four_mixed_requests_with_random_disconnects_leave_nothing(server: Server) -> None:
    rng = random.Random(0)

    async def one(client: httpx.AsyncClient, index: int) -> None:
        leaves_at_first_event = index % 4 == 0
        body = {
            "model": "tiny",
            "prompt": "One document, many questions. " * rng.randrange(1, 12) + str(index % 7),
            "max_tokens": 400 if leaves_at_first_event else rng.randrange(1, 200),
            "temperature": rng.choice([0, 1]),
            "n": rng.choice([1, 1, 2]),
            "stream": leaves_at_first_event or rng.random() < 0.6,
            "ignore_eos": True,
        }
        patience = 30 if leaves_at_first_event else rng.choice([0.01, 0.1, 0.5, 30])
        try:
            async with asyncio.timeout(patience):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200
                    async for _ in response.aiter_bytes():
                        if leaves_at_first_event:
                            break
        except TimeoutError:
            pass

    async def everyone() -> None:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=64)
        ) as client:
            await asyncio.gather(*(one(client, i) for i in range(64)))

    asyncio.run(everyone())
    deadline = time.monotonic() + 20
    while (stats := server.info(check_invariants=True)["stats"])["running"] + stats[
        "waiting"
    ] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert stats["running"] == stats["waiting"] == stats["pages_owned"] == 0
    assert stats["pages_evictable"] == stats["pages_cached"]
    assert stats["aborted"] > 0 and stats["malformed_frames"] == 0


def test_a_client_that_hangs_up_frees_its_pages_within_a_step(server: Server) -> None:
    body = {
        "model": "tiny",
        "prompt": "Go on",
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        worker = process_of(server, "worker")
        worker.suspend()  # the answer does not end by itself
    try:
        until(lambda: server.info()["stats"]["running"] == 0)
    finally:
        worker.resume()
    stats = server.info(check_invariants=True)["stats"]
    assert stats["running"] == 0 and stats["pages_owned"] == 0


def test_bad_requests_do_not_disturb_a_running_one(server: Server) -> None:
    bad_bodies: list[bytes] = [
        b"{",
        b'{"model": "tiny"}',
        b'{"model": "tiny", "prompt": ""}',
        b'{"model": "tiny", "prompt": "x", "temperature": -1}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": [999999]}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": 100000}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "nobody", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "' + b"x " * 2000 + b'"}',
    ]
    settings = {
        "model": "tiny",
        "prompt": "Go on",
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 0,
    }
    undisturbed = httpx.post(f"{server.url}/v1/completions", json=settings, timeout=60).json()[
        "choices"
    ][0]["text"]

    async def together() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            good = asyncio.create_task(client.post("/v1/completions", json=settings))
            headers = {"content-type": "application/json"}
            for body in bad_bodies:
                response = await client.post("/v1/completions", content=body, headers=headers)
                assert 400 <= response.status_code < 500, (body[:60], response.text)
                assert response.json()["error"]["message"], body[:60]
            return str((await good).json()["choices"][0]["text"])

    assert asyncio.run(together()) == undisturbed


def test_a_timeout_of_an_hour_is_no_problem_and_a_short_one_is_kept(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Go on", "max_tokens": 4, "timeout": 3600}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200
    body |= {"max_tokens": 480, "timeout": 0.05, "ignore_eos": True, "n": 8}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"abort", "length"}
    assert server.info(check_invariants=True)["stats"]["running"] == 0


def test_health_generate_really_generates(server: Server) -> None:
    before = server.info()["stats"]["output_tokens"]
    assert httpx.get(f"{server.url}/health_generate", timeout=30).status_code == 200
    assert server.info()["stats"]["output_tokens"] > before


def test_flush_cache_empties_the_tree(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="Something to remember " * 5, max_tokens=1)
    assert server.info()["stats"]["pages_cached"] > 0
    assert httpx.post(f"{server.url}/flush_cache").status_code == 200
    assert server.info(check_invariants=True)["stats"]["pages_cached"] == 0


def test_an_idle_connection_outlives_the_clients_patience(server: Server) -> None:
    """Clients close idle connections after five seconds; a server that does so too closes some that
    are just used."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("GET", "/v1/models")
    connection.getresponse().read()
    socket = connection.sock
    time.sleep(6)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200 and connection.sock is socket
    connection.close()
