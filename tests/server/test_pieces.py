"""Prompts that arrive in pieces, against an engine: what arrives is computed ahead, and the answer is
that of the whole prompt at once."""

import os
import random
import re
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

import radixrt.lang as rl
from radixrt.api.http import endpoints
from tests.api.conftest import RunningServer
from tests.checkpoints import make_checkpoint
from tests.servers.servers_in_process import serving_in_process
from tests.tokenizer.test_settled import KINDS, texts

SPLITS = int(os.environ.get("RADIXRT_SPLITS", "0"))
"""Of each of 50 texts, with every tokenizer; ``make test-pieces`` takes 20. 0: a sample with one."""
NUM_TEXTS, SPLITS_OF_A_TEXT = (50, SPLITS) if SPLITS else (4, 3)
EXAMPLE = Path(__file__).parents[2] / "examples" / "pieces.py"
FACTS = "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. "
QUESTION = "What is the port of Vidur?"
SAMPLING = {"max_tokens": 12, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving_in_process("demo", served_model_name="demo", idle_share=1.0) as one:
        yield one


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as one:
        one.post("/flush_cache")
        yield one


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stats(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/get_server_info").json()["stats"]
    return found


def wait_for_idle_tokens(client: httpx.Client, least: int) -> int:
    deadline = time.monotonic() + 20
    while (tokens := stats(client)["idle_tokens"]) < least:
        assert time.monotonic() < deadline, tokens
        time.sleep(0.02)
    return int(tokens)


def choice(answer: Any) -> Any:
    found = answer["choices"][0]
    return found["message"]["content"] if "message" in found else found["text"]


def test_what_has_arrived_is_cached_when_the_prompt_is_committed(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_warned", set())
    content = FACTS * 8 + QUESTION
    messages = [{"role": "user", "content": content}]
    whole = post(client, "/v1/chat/completions", messages=messages, **SAMPLING)
    client.post("/flush_cache")
    before = stats(client)["idle_tokens"]
    opened = post(client, "/v1/prompts", messages=[{"role": "user", "content": FACTS * 4}])
    wait_for_idle_tokens(client, before + 60)
    path = f"/v1/prompts/{opened['id']}"
    assert post(client, path, text=FACTS * 4)["pieces"] == 2
    wait_for_idle_tokens(client, before + 150)
    assert post(client, path, text=QUESTION)["pieces"] == 3
    time.sleep(0.3)
    committed = post(client, f"{path}/commit", **SAMPLING)
    assert choice(committed) == choice(whole)
    assert "Ignored unknown" not in caplog.text, "it takes the fields of a chat"
    prompt_tokens = committed["usage"]["prompt_tokens"]
    assert prompt_tokens == whole["usage"]["prompt_tokens"]
    cached = committed["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert prompt_tokens - cached <= 64
    assert client.post(path, json={"text": "more"}).status_code == 404


def test_every_dialect_may_name_a_prompt(client: httpx.Client) -> None:
    first, rest = {"role": "user", "content": FACTS}, {"role": "user", "content": QUESTION}
    between = {"role": "assistant", "content": "I see."}
    messages = [first, between, rest]
    greedy = {"temperature": 0, "max_tokens": 8}
    expected = choice(post(client, "/v1/chat/completions", messages=messages, **greedy))
    opened = post(client, "/v1/prompts", messages=[first])["id"]
    post(client, f"/v1/prompts/{opened}", messages=[between])
    named: dict[str, Any] = {"continue_from": opened, **greedy}
    assert choice(post(client, "/v1/chat/completions", messages=[rest], **named)) == expected
    answer = post(client, "/v1/messages", messages=[rest], model="demo", **named)
    assert answer["content"][0]["text"] == expected
    answer = post(client, "/v1/responses", input=QUESTION, continue_from=opened, temperature=0, max_output_tokens=8)  # fmt: skip
    assert answer["output"][0]["content"][0]["text"] == expected
    options = {"temperature": 0, "num_predict": 8}
    answer = post(client, "/api/chat", model="demo", messages=[rest], stream=False, continue_from=opened, options=options)  # fmt: skip
    assert answer["message"]["content"] == expected
    assert client.delete(f"/v1/prompts/{opened}").status_code == 200
    text = post(client, "/v1/prompts", prompt=FACTS)["id"]
    sampling = {"temperature": 0, "max_new_tokens": 8}
    answer = post(client, "/generate", text=QUESTION, continue_from=text, sampling_params=sampling)
    whole = post(client, "/v1/completions", prompt=FACTS + QUESTION, **greedy)
    assert answer["text"] == choice(whole)
    for wrong in ({"text": QUESTION, "continue_from": "gone"}, {"text": ["a"], "continue_from": text}):  # fmt: skip
        assert client.post("/generate", json=wrong).status_code in (400, 404)
    client.delete(f"/v1/prompts/{text}").raise_for_status()


@pytest.fixture(scope="module", params=KINDS if SPLITS else ["demo"])
def tokenized(
    request: pytest.FixtureRequest, server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server of a model with one of the tokenizers."""
    kind = request.param
    if kind == "demo":
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client
        return
    tokenizer = KINDS[kind]()
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp(kind), vocab_size=1024, max_position_embeddings=4096
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    with (
        serving_in_process(folder) as own,
        httpx.Client(base_url=own.url, timeout=60) as client,
    ):
        yield client


def test_random_splits_give_the_ids_and_bits_of_the_whole(tokenized: httpx.Client) -> None:
    rng = random.Random(1)
    fields = {"max_tokens": 4, "seed": 3, "logprobs": 3, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    ahead = -stats(tokenized)["idle_tokens"]
    for text in texts(NUM_TEXTS):
        tokenized.post("/flush_cache")
        whole = post(tokenized, "/v1/completions", prompt=text, **fields)["choices"][0]
        for split in range(SPLITS_OF_A_TEXT):
            salt = {"cache_salt": str(split)}
            cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(1, 5)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            opened = post(tokenized, "/v1/prompts", prompt=pieces[0], **salt)["id"]
            for piece in pieces[1:]:
                time.sleep(rng.choice([0, 0.03]))  # idle work begins a moment later
                post(tokenized, f"/v1/prompts/{opened}", text=piece, **salt)
            found = post(tokenized, f"/v1/prompts/{opened}/commit", **fields, **salt)["choices"][0]
            for name in ("prompt_token_ids", "token_ids", "logprobs"):
                assert found[name] == whole[name], (name, pieces)
    ahead += stats(tokenized)["idle_tokens"]
    assert ahead > NUM_TEXTS * SPLITS_OF_A_TEXT, "some tokens of most splits"


def test_abandoned_prompts_give_their_pages_back(
    client: httpx.Client, server: RunningServer
) -> None:
    before = stats(client)
    opened = post(client, "/v1/prompts", prompt=FACTS * 10)["id"]
    wait_for_idle_tokens(client, before["idle_tokens"] + 100)
    assert client.delete(f"/v1/prompts/{opened}").status_code == 200
    assert client.delete(f"/v1/prompts/{opened}").status_code == 404
    refused = client.post("/v1/chat/completions", json={"messages": [], "continue_from": opened})
    assert refused.status_code == 404
    deadline = time.monotonic() + 10
    while stats(client)["sessions"] > before["sessions"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = server.info(check_invariants=True)["stats"]
    assert found["running"] == found["pages_owned"] == 0
    assert found["pages_evictable"] == found["pages_cached"]


def test_open_prompts_are_bounded(client: httpx.Client) -> None:
    opened = []
    while (answer := client.post("/v1/prompts", json={"prompt": "Hello"})).status_code == 200:
        opened.append(answer.json()["id"])
        assert len(opened) <= 64
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_prompts"
    assert len(opened) == 64
    too_much = client.post(f"/v1/prompts/{opened[0]}", json={"text": "x" * (31 << 20)})
    more = client.post(f"/v1/prompts/{opened[1]}", json={"text": "x" * (2 << 20)})
    assert (too_much.status_code, more.status_code) == (200, 429)
    for one in opened:
        client.delete(f"/v1/prompts/{one}")


def test_pieces_that_do_not_fit_are_refused(client: httpx.Client) -> None:
    text = post(client, "/v1/prompts", prompt="Hello")["id"]
    chat = post(client, "/v1/prompts", messages=[{"role": "user", "content": "Hello"}])["id"]
    turn = [{"role": "user", "content": "x"}]
    assert client.post(f"/v1/prompts/{text}", json={"messages": turn}).status_code == 400
    assert client.post(f"/v1/prompts/{chat}", json={}).status_code == 400
    salted = {"text": "x", "cache_salt": "other"}
    assert client.post(f"/v1/prompts/{chat}", json=salted).status_code == 404
    assert client.post(f"/v1/prompts/{chat}/commit", json={"temperature": -1}).status_code == 400
    assert client.post(f"/v1/prompts/{chat}", json={"text": " there"}).status_code == 200
    for one in (text, chat):
        client.delete(f"/v1/prompts/{one}")


def test_the_example_leaves_little_to_compute(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["pieces.py", "--base-url", server.url, "--pause", "0.1"]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    output = capsys.readouterr().out
    at_once, in_pieces = map(int, re.findall(r": (\d+) tokens to compute", output))
    assert in_pieces < at_once / 2
    assert "the answers are equal" in output


def test_a_program_of_the_language_computes_ahead(
    client: httpx.Client, server: RunningServer
) -> None:
    before = stats(client)["idle_tokens"]

    @rl.function(temperature=0, max_tokens=8)
    def program(s: rl.State) -> None:
        s += rl.system(FACTS * 3)
        s.compute_ahead()
        wait_for_idle_tokens(client, before + 50)  # as a search would take its time
        s += rl.user(QUESTION) + rl.assistant(rl.gen("answer"))

    state = program.run(backend=rl.Server(server.url))
    (call,) = state.calls()
    assert call.usage.cached_tokens >= 48
