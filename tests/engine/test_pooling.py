"""Vectors and classes equal those of transformers, whatever the cache, the batch and the chunks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file

from radixrt.messages.requests import PoolingRequest
from tests.checkpoints import make_pooled
from tests.engine.in_process import InProcessEngine
from tests.models.test_against_transformers import random_tokens

TOLERANCE = 2e-5
SHARED = random_tokens(40, seed=1)
PROMPTS = [[*SHARED, *random_tokens(n, seed=n)] for n in (1, 30, 31, 7)]
SHORT = [random_tokens(n, seed=n) for n in (1, 2, 30, 33, 90, 33)]

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """``make_pooled`` in a folder of its own; the same model is made once."""
    made: dict[str, Path] = {}

    def get(architecture: str, **options: Any) -> Path:
        key = f"{architecture} {options}"
        if key not in made:
            made[key] = make_pooled(architecture, tmp_path_factory.mktemp("model"), **options)
        return made[key]

    return get


@torch.inference_mode()
def hidden_states(folder: Path, prompt: list[int]) -> torch.Tensor:
    """[tokens, hidden_size] of transformers."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    return model(torch.tensor([prompt])).last_hidden_state[0]


def check_equal(found: list[NDArray[np.float32]], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 24, "page_size": 4}])
def test_last_token_vectors_are_the_same_from_a_cold_and_a_warm_cache(
    make: Make, settings: dict[str, Any]
) -> None:
    folder = make("qwen3", pooling="lasttoken")
    expected = [
        torch.nn.functional.normalize(hidden_states(folder, prompt)[-1], dim=0)
        for prompt in PROMPTS
    ]
    engine = InProcessEngine(folder, **settings)
    assert engine.info.pooling and engine.info.pooling.size == 64
    check_equal(engine.pool(PROMPTS), expected)
    check_equal(engine.pool(PROMPTS), expected)
    assert min(engine.cached) >= len(SHARED) // 16 * 16
    check_equal(engine.pool(PROMPTS[:1]), expected[:1])


def test_a_decoder_computes_a_common_beginning_once(make: Make) -> None:
    engine = InProcessEngine(make("qwen3", pooling="lasttoken"), page_size=4)
    engine.pool(PROMPTS)
    computed = sum(map(len, PROMPTS)) - sum(engine.cached)
    assert computed == len(SHARED) + sum(len(prompt) - len(SHARED) for prompt in PROMPTS)


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_of_some_tokens_behind_a_prompt(
    checkpoint: Callable[[str], Path], tied: bool
) -> None:
    folder = checkpoint("qwen3" if tied else "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = InProcessEngine(folder)
    found = engine.pool(PROMPTS, PoolingRequest((7, 300, 11)))
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    check_equal(found, [row[[7, 300, 11]] for row in logits])


@pytest.mark.parametrize(
    ("architecture", "pooling", "normalize", "dense"),
    [
        ("bert", "mean", True, ()),
        ("bert", "cls", False, ()),
        ("xlm_roberta", "cls", True, ()),
        ("modernbert", "mean", False, ()),
        ("embeddinggemma", "mean", True, (96, 48)),
    ],
)
def test_vectors_of_encoders_of_prompts_of_many_lengths_in_one_step(
    make: Make, architecture: str, pooling: str, normalize: bool, dense: tuple[int, ...]
) -> None:
    folder = make(architecture, pooling=pooling, normalize=normalize, dense=dense)

    def expected(prompt: list[int]) -> torch.Tensor:
        hidden = hidden_states(folder, prompt)
        vector = hidden.mean(0) if pooling == "mean" else hidden[0]
        for i in range(len(dense)):
            weight = load_file(folder / f"{2 + i}_Dense/model.safetensors")["linear.weight"]
            vector = weight @ vector
        return vector / vector.norm() if normalize else vector

    engine = InProcessEngine(folder)
    assert engine.info.pooling and engine.info.pooling.size == (dense or (64,))[-1]
    together = engine.pool(SHORT)
    check_equal(together, [expected(prompt) for prompt in SHORT])
    check_equal(engine.pool(SHORT[2:3]), [torch.tensor(together[2])])
    assert engine.cached == [0]


@pytest.mark.parametrize("architecture", ["bert", "xlm_roberta", "modernbert", "qwen3"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_of_pairs_and_texts(make: Make, architecture: str, num_labels: int) -> None:
    folder = make(architecture, num_labels=num_labels)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()

    @torch.inference_mode()
    def expected(prompt: list[int], second_segment_start: int) -> torch.Tensor:
        types = (torch.arange(len(prompt)) >= second_segment_start).long()[None]
        kinds = {"token_type_ids": types} if architecture == "bert" and second_segment_start else {}
        scores = model(torch.tensor([prompt]), **kinds).logits[0]
        return scores.sigmoid() if num_labels == 1 else scores.softmax(0)

    engine = InProcessEngine(folder)
    for second_segment_start in (0, 1):
        found = engine.pool(SHORT, second_segment_start=second_segment_start)
        check_equal(found, [expected(prompt, second_segment_start) for prompt in SHORT])


def test_a_prompt_of_an_encoder_is_never_cut_into_chunks(make: Make) -> None:
    engine = InProcessEngine(
        make("bert"), max_prefill_tokens=40, chunked_prefill_size=16, max_running_requests=4
    )
    alone = [engine.pool([prompt])[0] for prompt in SHORT]
    check_equal(engine.pool(SHORT), [torch.tensor(one) for one in alone])


def test_numbers_that_are_not_finite_end_the_request_with_an_error(make: Make) -> None:
    engine = InProcessEngine(make("bert", initializer_range=1e30))
    (request,) = engine.pool_requests(SHORT[:1])
    engine.scheduler.add(request)
    (batch,) = engine.advance()
    assert [refused.status for refused in batch.refused] == [500] and not batch.outputs
