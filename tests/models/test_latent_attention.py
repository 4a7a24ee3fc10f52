"""Models with latent attention: transformers' logits in all their forms, the same bits however a
prompt is computed, and the latents of the published sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

import radixrt_kernels
from radixrt.attention.backend import AttentionSetup
from radixrt.attention.kv_spec import KVSpec
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.latent_attention import LatentAttention
from radixrt.layers.matrix import DenseMatrix
from radixrt.layers.mlp import SigmoidRouter, SoftmaxGroupRouter
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from radixrt.worker.kv.pool import KVPool
from tests.checkpoints import YARN_OF_LATENTS, make_checkpoint
from tests.models.harness import Harness, check_chunks_and_batches
from tests.models.test_against_transformers import IN_FULL, random_tokens

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)

TOLERANCE = 1e-5
PROMPT = random_tokens(80, seed=80)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 lite": ("deepseek_v2", {"hidden_size": 32}),
    "v2": ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "group_limited_greedy"}),
    "v3": ("deepseek_v3", {"attention_bias": True}),
    "v3 without q_lora": ("deepseek_v3", {"q_lora_rank": None}),
    "v3 in halves": ("deepseek_v3", {"rope_interleave": False}),
    "glm": ("glm4_moe_lite", {}),
    "glm without q_lora": ("glm4_moe_lite", {"q_lora_rank": None}),
    "glm with mscale": ("glm4_moe_lite", {"rope_parameters": YARN_OF_LATENTS}),
}


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, overrides = FORMS[request.param]
    folder = tmp_path_factory.mktemp("latents")
    return make_checkpoint(name, folder, initializer_range=0.1, **overrides)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_model(folder, kernels=NativeKernels())


@torch.inference_mode()
def expected_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return theirs(torch.tensor([tokens])).logits[0]


def test_logits_equal_transformers(folder: Path, model: CausalLM) -> None:
    for length in (1, 17, 300):
        tokens = random_tokens(length, seed=length)
        found = Harness(model, page_size=16).logits(tokens)
        torch.testing.assert_close(
            found, expected_logits(folder, tokens), atol=TOLERANCE, rtol=0, check_stride=False
        )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", None), ("bfloat16", torch.int8)]
    + IN_FULL * [("float32", torch.int8), ("bfloat16", None)],
    ids=str,
)
def test_chunks_and_batches_change_no_bit(
    folder: Path, dtype: str, kv_dtype: torch.dtype | None
) -> None:
    model = load_model(folder, dtype=dtype, kernels=NativeKernels())
    harness = Harness(model, page_size=4, kv_dtype=kv_dtype)
    check_chunks_and_batches(harness, PROMPT)


def log_probabilities(model: CausalLM, kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    harness = Harness(model, page_size=16, kv_dtype=kv_dtype)
    return harness.logits(random_tokens(400, seed=5)).float().log_softmax(-1)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """In nats, of a token in the middle: of some, the router chooses other experts."""
    return (exact.exp() * (exact - other)).sum(-1).median()


def test_an_int8_cache_diverges_little(model: CausalLM) -> None:
    coded = log_probabilities(model, torch.int8)
    assert 0 < divergence(log_probabilities(model), coded) < 5e-5


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_an_int8_cache_of_the_published_sizes_costs_about_what_bfloat16_does(
    family: str, tmp_path: Path
) -> None:
    """See docs/internals/quantization.md."""
    sizes = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    folder = make_checkpoint(family, tmp_path, initializer_range=0.1, **sizes)
    model = load_model(folder, kernels=NativeKernels())
    halved = load_model(folder, dtype="bfloat16", kernels=NativeKernels())
    exact = log_probabilities(model)
    of_bfloat16 = divergence(exact, log_probabilities(halved))
    assert 0 < divergence(exact, log_probabilities(model, torch.int8)) < 2 * of_bfloat16


def _without_mscale(block: LatentAttention) -> None:
    spec = block.spec
    block.spec = type(spec)(spec.num_heads, 1, spec.head_dim, (16 + 8) ** -0.5)


def _with_pairs_swapped(block: LatentAttention) -> None:
    block.rotary.interleaved = not block.rotary.interleaved


def _with_values_of_another_page(block: LatentAttention) -> None:
    values = block.kv_b_proj.values
    multiply = values.multiply
    values.multiply = lambda hidden, output: multiply(hidden.roll(1, 0), output)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mutate", [_without_mscale, _with_pairs_swapped, _with_values_of_another_page]
)
def test_what_is_wrong_shows(
    mutate: Callable[[LatentAttention], None], checkpoint: Callable[[str], Path]
) -> None:
    """Otherwise the tests above would pass with it."""
    folder = checkpoint("deepseek_v3")
    model = load_model(folder, kernels=NativeKernels())
    for block in model.modules():
        if isinstance(block, LatentAttention):
            mutate(block)
    difference = Harness(model, page_size=16).logits(PROMPT) - expected_logits(folder, PROMPT)
    assert difference.abs().max() > 100 * TOLERANCE


def test_a_token_takes_1152_bytes_a_layer_at_the_published_sizes() -> None:
    """Of DeepSeek V2, V3 and GLM-4.7-Flash: 512 features of the latent and 64 rotated ones."""
    config = transformers.DeepseekV3Config(
        hidden_size=64, num_attention_heads=128, num_hidden_layers=1
    )
    with torch.device("meta"):
        rotary = RotaryEmbedding(config, 16)
        block = LatentAttention(config, 0, rotary, TensorParallel())
    assert block.kv_spec(torch.bfloat16).bytes_per_token == 1152
    assert block.kv_spec(torch.int8).bytes_per_token == 580
    assert KVSpec.latents(512, 64, torch.bfloat16).tensors[0].shape == (1, 576)
    layers, pages, page_size = 3, 7, 16
    setup = AttentionSetup(page_size=page_size, kv_specs=[block.kv_spec(torch.bfloat16)] * layers)
    tensors = [tensor for layer in KVPool(setup, pages).kv_caches for tensor in layer]
    taken = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert taken == 1152 * layers * page_size * (pages + 1)  # one page is spare


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("family", ["v2", "v3"])
@torch.inference_mode()
def test_the_router_chooses_as_transformers_does(family: str, groups: int) -> None:
    """Of 10,000 rows, a tenth with tied experts, of which any may be chosen."""
    torch.manual_seed(0)
    shared = {
        "hidden_size": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": groups,
        "topk_group": max(1, groups // 2),
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 4,
    }
    kind = SigmoidRouter if family == "v3" else SoftmaxGroupRouter
    ours = kind(16, 16, 4, family == "v3", num_groups=groups, top_groups=max(1, groups // 2), factor=2.5)  # fmt: skip
    theirs: Any
    if family == "v3":
        theirs = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**shared))
        theirs.e_score_correction_bias.copy_(torch.randn(16) / 4)
        ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
    else:
        method = "group_limited_greedy" if groups > 1 else "greedy"
        theirs = DeepseekV2TopkRouter(transformers.DeepseekV2Config(topk_method=method, **shared))
    weight = torch.randn(16, 16)
    weight[1::4] = weight[0::4]  # equal scores, but for the bias
    theirs.weight.copy_(weight)
    ours.allocate(DenseMatrix)
    assert isinstance(ours.matrix, DenseMatrix)
    ours.matrix.weight.copy_(weight)
    hidden = torch.randn(10_000, 16)
    _, expected, their_choice = theirs(hidden)
    weights, choice = ours.choose(hidden)
    torch.testing.assert_close(
        weights.sort(-1).values, expected.sort(-1).values, atol=1e-6, rtol=1e-5
    )
    assert (choice.sort(-1).values == their_choice.sort(-1).values).all(-1).float().mean() > 0.5


def test_the_bias_is_no_weight() -> None:
    router = SigmoidRouter(4, 4, 1, normalize=False)
    router.allocate(DenseMatrix)
    assert isinstance(router.matrix, DenseMatrix)
    router.matrix.weight.zero_()
    router.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    weights, choice = router.choose(torch.ones(1, 4))
    assert (weights.item(), choice.item()) == (0.5, 2)


def test_the_projections_are_absorbed(folder: Path, model: CausalLM) -> None:
    """Heads over latents are the heads over expanded keys and values."""
    block = next(b for b in model.modules() if isinstance(b, LatentAttention))
    up = block.kv_b_proj
    latent, query = torch.randn(9, up.columns), torch.randn(5, up.heads, up.key_dim)
    absorbed = query.new_empty(5, up.heads, up.columns)
    up.keys.multiply(query, absorbed)
    scores = absorbed @ latent.T / up.columns  # [queries, heads, keys]
    found = absorbed.new_empty(5, up.heads, up.value_dim)
    up.values.multiply(scores.softmax(-1) @ latent, found)
    weights = load_file(folder / "model.safetensors")
    weight = weights["model.layers.0.self_attn.kv_b_proj.weight"]
    expanded = (latent @ weight.T).unflatten(-1, (up.heads, -1))
    keys, values = expanded.split([up.key_dim, up.value_dim], dim=-1)
    expected = torch.einsum("qhd,khd->qhk", query, keys) / up.columns
    torch.testing.assert_close(scores, expected, atol=TOLERANCE, rtol=0)
    mixed = torch.einsum("qhk,khd->qhd", expected.softmax(-1), values)
    torch.testing.assert_close(found, mixed, atol=TOLERANCE, rtol=0)
