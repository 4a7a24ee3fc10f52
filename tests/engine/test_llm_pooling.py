"""Vectors and scores of pairs in a Python program, on an engine in threads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from radixrt import LLM
from radixrt.base.errors import RequestError
from tests.checkpoints import make_pooled, make_tokenizer
from tests.models.test_against_transformers import random_tokens
from tests.servers.engine_in_threads import engines_in_threads

SHARED = random_tokens(40, seed=1)
PROMPTS = [[*SHARED, *random_tokens(n, seed=n)] for n in (1, 30, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(
        make_pooled("qwen3", tmp_path_factory.mktemp("qwen3"), pooling="lasttoken")
    )


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[LLM]:
    with engines_in_threads():
        llm = LLM(str(folder), page_size=4, max_total_tokens=4096)
    with llm:
        yield llm


def test_vectors_equal_those_of_transformers_and_share_their_beginning(
    embedder: LLM, folder: Path
) -> None:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = embedder.embed(PROMPTS)
    with torch.inference_mode():
        last = [model(torch.tensor([one])).last_hidden_state[0, -1] for one in PROMPTS]
    expected = torch.nn.functional.normalize(torch.stack(last)).numpy()
    np.testing.assert_allclose(np.stack([one.vector for one in found]), expected, atol=2e-5)
    assert [one.num_prompt_tokens for one in found] == [41, 70, 47]
    (alone,) = embedder.embed([PROMPTS[1]], dimensions=8)
    assert alone.cached_tokens >= len(SHARED)
    shorter = expected[1][:8] / np.linalg.norm(expected[1][:8])
    np.testing.assert_allclose(alone.vector, shorter, atol=2e-5)
    one = embedder.embed(PROMPTS[0])
    np.testing.assert_allclose(one.vector, expected[0], atol=2e-5)
    assert embedder.embed([]) == []


def test_pairs_are_scored_by_the_cosine_of_their_vectors(embedder: LLM) -> None:
    query, *documents = ["Where do cats sleep?", "Cats sleep anywhere.", "Rates rose."]
    first, *others = (embedder.embed(text).vector for text in (query, *documents))
    scores = embedder.score_pairs(query, documents)
    assert scores == pytest.approx([float(first @ other) for other in others], abs=1e-5)
    assert embedder.score_pairs([query, documents[0]], documents[::-1])[1] == pytest.approx(
        float(others[0] @ others[0]), abs=1e-5
    )


def test_what_cannot_be_given_is_refused(embedder: LLM, tiny_llm: LLM) -> None:
    with pytest.raises(RequestError, match="dimensions must be from 1 to 64"):
        embedder.embed(PROMPTS, dimensions=65)
    with pytest.raises(RequestError, match="generates no text"):
        embedder.generate("a")
    with pytest.raises(RequestError, match="gives no vectors"):
        tiny_llm.embed("a")
    with pytest.raises(RequestError, match="text_2 3"):
        embedder.score_pairs(["a", "b"], ["a", "b", "c"])
    long = [3] * 9000
    with pytest.raises(RequestError):
        embedder.embed(long)
    assert embedder.embed(long, truncate_prompt_tokens=12).num_prompt_tokens == 12
