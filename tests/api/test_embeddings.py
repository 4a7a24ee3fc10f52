"""Embeddings, reranking, scores and classes through their clients, with a scheduler that gives
scripted numbers."""

import base64
import contextlib
import io
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import ollama
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.api.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScorePairsRequest,
)
from radixrt.api.ollama.translation import EmbedRequest, OldEmbedRequest
from radixrt.client.choice_scoring import shared_tokens
from radixrt.messages.ids import num_ids, unpack_ids
from radixrt.messages.requests import PairPrompt, PoolingInfo, PoolingRequest
from radixrt.messages.sequences import SequenceRequest
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_fuzz import bodies, many_bodies, send, texts, token_ids, values
from tests.docs.pages import ROOT, blocks
from tests.servers.fake_scheduler import CACHED_TOKENS, VECTOR, engine_info
from tests.servers.real_scheduler import RealScheduler

SAID = "http://127.0.0.1:30000"
UNIT = np.array(VECTOR) / 13


def started(start_server: StartServer, pooling: PoolingInfo) -> RunningServer:
    return start_server(info=engine_info(pooling=pooling))


@pytest.fixture(scope="module")
def embedder(start_server: StartServer) -> RunningServer:
    return started(start_server, PoolingInfo(task="embed", size=len(VECTOR), normalized=True))


@pytest.fixture(scope="module")
def cross_encoder(start_server: StartServer) -> RunningServer:
    return started(start_server, PoolingInfo(task="classify", size=1, labels=("fits",)))


@pytest.fixture(scope="module")
def classifier(start_server: StartServer) -> RunningServer:
    return started(start_server, PoolingInfo(task="classify", size=2, labels=("bad", "good")))


@pytest.fixture(scope="module")
def judge(start_server: StartServer) -> RunningServer:
    """A decoder that generates text, and judges by the tokens 310 and 311."""
    return start_server(info=engine_info(score_tokens=(310, 311)))


@pytest.fixture(autouse=True)
def forget(
    embedder: RunningServer,
    cross_encoder: RunningServer,
    classifier: RunningServer,
    judge: RunningServer,
) -> Iterator[None]:
    for server in (embedder, cross_encoder, classifier, judge):
        server.scheduler.requests.clear()
        server.scheduler.vector = lambda request: VECTOR
    yield


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.http as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(
    server: RunningServer, path: str, body: dict[str, Any], status: int = 400
) -> tuple[str | None, str]:
    with server.http as http:
        response = http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return (None, error) if isinstance(error, str) else (error["param"], error["message"])


def ids_of(server: RunningServer, request: SequenceRequest) -> list[int]:
    return unpack_ids(request.token_ids).tolist()


# ------------------------------------------------------------ /v1/embeddings


def test_openai_client_gets_vectors_in_its_default_form(embedder: RunningServer) -> None:
    found = embedder.openai.embeddings.create(model="tiny", input=["Hello world", "the"])
    assert [one.index for one in found.data] == [0, 1]
    np.testing.assert_allclose([one.embedding for one in found.data], [VECTOR] * 2)
    sent = [num_ids(request.token_ids) for request in embedder.scheduler.requests]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(sent)
    assert found.usage.prompt_tokens_details == {"cached_tokens": 2 * CACHED_TOKENS}


def test_both_formats_have_the_same_numbers(embedder: RunningServer) -> None:
    body = {"input": "hi"}
    numbers = post(embedder, "/v1/embeddings", body)["data"][0]["embedding"]
    packed = post(embedder, "/v1/embeddings", body | {"encoding_format": "base64"})
    assert numbers == list(VECTOR)
    assert (
        np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4").tolist() == numbers
    )


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_token_ids_are_taken_as_they_are(embedder: RunningServer, given: list[Any]) -> None:
    post(embedder, "/v1/embeddings", {"input": given})
    sent = [ids_of(embedder, request) for request in embedder.scheduler.requests]
    assert sent == (given if isinstance(given[0], list) else [given])


def test_shorter_vectors_have_length_one_again(embedder: RunningServer) -> None:
    body = {"input": "hi", "dimensions": 3}
    assert post(embedder, "/v1/embeddings", body)["data"][0]["embedding"] == pytest.approx(
        [0.6, 0.0, 0.8]
    )


def test_a_long_input_is_refused_or_cut_as_asked(embedder: RunningServer) -> None:
    long = "the " * 600
    param, message = refusal(embedder, "/v1/embeddings", {"input": long})
    assert param == "input" and "512" in message
    for asked, length in ((-1, 512), (5, 5), (512, 512)):
        embedder.scheduler.requests.clear()
        post(embedder, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": asked})
        post(embedder, "/v1/embeddings", {"input": [9] * 600, "truncate_prompt_tokens": asked})
        sent = [ids_of(embedder, request) for request in embedder.scheduler.requests]
        whole = embedder.vocabulary.encode(long, add_special_tokens=True)
        assert sent == [whole[:length], [9] * length]


def test_salt_priority_and_deadline_count_as_in_other_requests(embedder: RunningServer) -> None:
    post(embedder, "/v1/embeddings", {"input": "hi", "cache_salt": "mine", "timeout": 50})
    (request,) = embedder.scheduler.requests
    assert request.options.root.salt == "mine" and request.options.deadline


BAD = [
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": [[]]}, "input", "empty"),
    ({"input": ["hi", ""]}, "input", "empty"),
    ({"input": [5, "hi"]}, "input", "not mixed"),
    ({"input": [5000]}, "input", "vocabulary"),
    ({"input": "hi", "dimensions": 0}, "dimensions", "from 1 to 4"),
    ({"input": "hi", "dimensions": 5}, "dimensions", "from 1 to 4"),
    ({"input": "hi", "encoding_format": "int8"}, "encoding_format", "base64"),
    ({"input": "hi", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 512"),
    ({"input": "hi", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "from 1 to 512"),
    ({"input": ["a"] * 5000}, None, "5000"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD)
def test_a_bad_field_is_named(
    embedder: RunningServer, body: dict[str, Any], param: str | None, words: str
) -> None:
    named, message = refusal(embedder, "/v1/embeddings", body)
    assert named == param and words in message
    assert embedder.scheduler.requests == [] or "" in body["input"]


def test_only_the_lengths_that_a_model_names_are_allowed(start_server: StartServer) -> None:
    info = PoolingInfo(task="embed", size=4, dimensions=(2, 4))
    server = started(start_server, info)
    assert "2, 4" in refusal(server, "/v1/embeddings", {"input": "hi", "dimensions": 3})[1]
    body = {"input": "hi", "dimensions": 2}
    assert post(server, "/v1/embeddings", body)["data"][0]["embedding"] == [3.0, 0.0]


def test_each_kind_of_model_refuses_what_it_cannot_give(
    embedder: RunningServer, classifier: RunningServer, judge: RunningServer
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hi"})):
        assert "/v1/embeddings" in refusal(embedder, path, body)[1]
    for path in ("/v1/embeddings", "/api/embed"):
        assert "modules.json" in refusal(judge, path, {"input": "hi"})[1]
    assert "/classify" in refusal(classifier, "/v1/embeddings", {"input": "hi"})[1]
    assert "not a classifier" in refusal(embedder, "/classify", {"input": "hi"})[1]
    pair = {"query": "a", "documents": ["b"]}
    assert "2 classes" in refusal(classifier, "/v1/rerank", pair)[1]
    with embedder.http as http:
        assert http.get("/health_generate").is_success
        assert http.get("/get_model_info").json()["is_generation"] is False


# ------------------------------------------------------------ Ollama


def test_ollama_client_gets_unit_vectors(embedder: RunningServer) -> None:
    client = ollama.Client(embedder.url)
    found = client.embed("tiny:latest", ["Hello world", "the"])
    np.testing.assert_allclose(found.embeddings, [UNIT] * 2, rtol=1e-6)
    assert found.prompt_eval_count and found.total_duration
    assert client.embed("tiny", "hi", dimensions=3).embeddings[0] == pytest.approx([0.6, 0.0, 0.8])
    assert client.embeddings("tiny", "hi").embedding == list(VECTOR)
    assert "embedding" in client.show("tiny").capabilities


def test_ollama_cuts_long_inputs_unless_told_not_to(embedder: RunningServer) -> None:
    client = ollama.Client(embedder.url)
    client.embed("tiny", "the " * 600)
    assert [num_ids(request.token_ids) for request in embedder.scheduler.requests] == [512]
    with pytest.raises(ollama.ResponseError, match="512"):
        client.embed("tiny", "the " * 600, truncate=False)
    assert post(embedder, "/api/embed", {})["embeddings"] == []
    assert post(embedder, "/api/embeddings", {"prompt": ""}) == {"embedding": []}


# ------------------------------------------------------------ reranking

DOCUMENTS = ["a cat", {"text": "a dog"}, "two cats"]


def test_a_cross_encoder_sorts_documents(cross_encoder: RunningServer) -> None:
    cross_encoder.scheduler.vector = lambda request: [1 / num_ids(request.token_ids)]
    body = {"query": "cat?", "documents": DOCUMENTS}
    found = post(cross_encoder, "/v1/rerank", body)
    scores = [result["relevance_score"] for result in found["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1
    named = {result["index"]: result["document"]["text"] for result in found["results"]}
    assert named == {0: "a cat", 1: "a dog", 2: "two cats"}
    best = post(cross_encoder, "/rerank", body | {"top_n": 1, "return_documents": False})
    assert best["results"] == [{k: found["results"][0][k] for k in ("index", "relevance_score")}]
    assert "document" not in post(cross_encoder, "/v2/rerank", body)["results"][0]


def test_a_decoder_judges_by_the_logits_of_two_tokens(judge: RunningServer) -> None:
    judge.scheduler.vector = lambda request: (2.0, 1.0)
    found = post(judge, "/v1/rerank", {"query": "cat?", "documents": ["a cat"], "instruct": "Find"})
    assert found["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-1)))
    (request,) = judge.scheduler.requests
    assert request.options.pool == PoolingRequest((310, 311))
    prompt = judge.vocabulary.decode(ids_of(judge, request))
    task = "<Instruct>: Find\n<Query>: cat?\n<Document>: a cat<|im_end|>"
    assert task in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_an_embedding_model_scores_by_cosine_and_computes_a_query_once(
    embedder: RunningServer,
) -> None:
    first = embedder.vocabulary.encode("cat?", add_special_tokens=True)
    embedder.scheduler.vector = lambda request: (
        (1.0, 0.0, 0.0, 0.0) if ids_of(embedder, request) == first else (3.0, 4.0, 0.0, 0.0)
    )
    found = post(embedder, "/v1/rerank", {"query": "cat?", "documents": ["a", "b", "cat?"]})
    scores = {result["index"]: result["relevance_score"] for result in found["results"]}
    assert scores == pytest.approx({0: 0.6, 1: 0.6, 2: 1.0})
    assert len(embedder.scheduler.requests) == 3


def test_documents_are_cut_to_their_limit_and_pairs_to_theirs(
    cross_encoder: RunningServer, judge: RunningServer
) -> None:
    cross_encoder.scheduler.vector = judge.scheduler.vector = lambda request: (1.0, 0.0)
    for server in (cross_encoder, judge):
        body = {"query": "cat?", "documents": ["the " * 600]}
        assert "512" in refusal(server, "/v1/rerank", body)[1]
        server.scheduler.requests.clear()
        post(server, "/v1/rerank", body | {"max_tokens_per_doc": 7})
        post(server, "/v1/rerank", {"query": "cat?", "documents": ["the the the the the the the"]})
        post(server, "/v1/rerank", body | {"truncate_prompt_tokens": 300})
        least = {"truncate_prompt_tokens": 3}
        assert refusal(server, "/v1/rerank", body | least)[0] == "truncate_prompt_tokens"
        cut, alike, whole = server.scheduler.requests
        assert ids_of(server, cut) == ids_of(server, alike)
        assert 290 < num_ids(whole.token_ids) <= 300


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"query": "a", "documents": ["b"] * 5000}, None),
        ({"documents": ["b"]}, "query"),
    ],
)
def test_a_bad_rerank_is_explained(
    cross_encoder: RunningServer, body: dict[str, Any], param: str | None
) -> None:
    assert refusal(cross_encoder, "/v1/rerank", body)[0] == param


# ------------------------------------------------------------ scores and classes


def test_pairs_are_scored_one_to_one_or_one_to_many(cross_encoder: RunningServer) -> None:
    cross_encoder.scheduler.vector = lambda request: [num_ids(request.token_ids)]
    for first, second, count in (
        ("a", "b", 1),
        ("a", ["b", "c d"], 2),
        (["a", "b"], ["c", "d"], 2),
    ):
        found = post(cross_encoder, "/score", {"text_1": first, "text_2": second})
        assert [one["index"] for one in found["data"]] == list(range(count))
        assert all(one["object"] == "score" and one["score"] > 1 for one in found["data"])
    for first, second, param in (([], "b", "text_1"), (["a", "b"], ["c"] * 3, "text_2")):
        assert refusal(cross_encoder, "/score", {"text_1": first, "text_2": second})[0] == param


def test_classes_come_with_their_names(classifier: RunningServer) -> None:
    classifier.scheduler.vector = lambda request: (0.25, 0.75)
    found = post(classifier, "/classify", {"input": ["hi", "the"]})
    assert found["data"] == [
        {"index": i, "label": "good", "probs": [0.25, 0.75], "num_classes": 2} for i in range(2)
    ]
    assert refusal(classifier, "/classify", {"input": ""})[0] == "input"


# ------------------------------------------------------------ the prefix of a query


def test_fifty_documents_behind_one_query_compute_it_once(start_server: StartServer) -> None:
    """By the server's own counters: 150 tokens of instruction and query or more, and 50 documents
    of about 200."""
    page = 4
    info = engine_info(
        page_size=page, kv_pool_tokens=65536, context_length=1024, score_tokens=(310, 311)
    )
    server = start_server(info=info, scheduler_type=RealScheduler)
    letters = [chr(ord("a") + i % 26) for i in range(100)]
    documents = [f"{i:02} " + " ".join(letters[i % 7 :])[:210] for i in range(50)]
    query = "where is the cat "
    found = post(server, "/v1/rerank", {"query": query, "documents": documents})
    assert sorted(result["index"] for result in found["results"]) == list(range(50))
    with server.http as http:
        stats = http.get("/v1/cache/stats").json()

    encoder, limits, *_ = PromptEncoder(server.vocabulary), Limits.from_info(info)
    prompts = [encoder.encode(PairPrompt(query, text), limits)[1] for text in documents]
    prefix = min(shared_tokens(prompts[0], prompt) for prompt in prompts)
    assert query in server.vocabulary.decode(prompts[0][:prefix])
    behind = [len(prompt) - prefix for prompt in prompts]
    assert prefix >= 150 and 180 <= sum(behind) / 50 <= 220
    computed = stats["prompt_tokens"] - stats["cached_tokens"]
    assert computed <= prefix + sum(behind) + 49 * (prefix % page)
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts)) == stats["prompt_tokens"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == stats["cached_tokens"]


# ------------------------------------------------------------ the page of the documentation


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_examples_of_the_page_are_answered(embedder: RunningServer) -> None:
    page = ROOT / "docs/embeddings.md"
    (program,) = blocks(page, "python")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program.replace(SAID, embedder.url).replace("Qwen3-Embedding-0.6B", "tiny"), {})
    # a server's thread may print its banner meanwhile
    assert re.search(rf"^{len(VECTOR)} \d+$", printed.getvalue(), re.MULTILINE)
    text = "\n".join(blocks(page, "bash"))
    requests = re.findall(r"^curl .*?'$", text, re.MULTILINE | re.DOTALL)
    assert len(requests) == text.count("curl ") == 2
    for command in requests:
        done = subprocess.run(
            ["bash", "-c", f"{command.replace(SAID, embedder.url)} -sS"],
            capture_output=True,
            text=True,
        )
        assert {"data", "results"} & orjson.loads(done.stdout).keys(), done.stdout


# ------------------------------------------------------------ whatever comes

strings = st.sampled_from(["hi", "", "<|im_end|>", "\x00", "é🦊"])
REQUESTS = {
    "/v1/embeddings": bodies(EmbeddingRequest, {"input": values | texts | token_ids}),
    "/api/embed": bodies(EmbedRequest, {"input": values | texts}),
    "/api/embeddings": bodies(OldEmbedRequest, {"prompt": strings}),
    "/v1/rerank": bodies(RerankRequest, {"query": strings, "documents": texts | values}),
    "/score": bodies(ScorePairsRequest, {"text_1": texts | strings, "text_2": texts | strings}),
    "/classify": bodies(ClassifyRequest, {"input": values | texts | token_ids}),
}


@pytest.mark.parametrize("path", REQUESTS)
@many_bodies
@given(data=st.data())
def test_no_body_brings_the_server_down(embedder: RunningServer, path: str, data: Any) -> None:
    response = send(embedder, path, data.draw(REQUESTS[path]))
    if response.status_code != 200:
        error = response.json()["error"]
        assert error if path.startswith("/api/") else error["message"]
    assert "nternal" not in response.text and "server_error" not in response.text
