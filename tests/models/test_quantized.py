"""Quantized checkpoints compute what their plain twins compute, and rounding a plain one changes
little."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.groupwise import (
    GroupwiseMatrix,
    pack_halves,
    quantize,
    unpack_halves,
)
from radixrt.layers.weights import weight_bytes
from radixrt.models.checkpoint import check_checkpoint
from radixrt.models.loader import load_model
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import Layout, quantize_checkpoint

torch.set_num_threads(1)
PROMPT = list(range(3, 33))

LAYOUTS = {
    "awq": Layout(),
    "awq_whole_rows": Layout(group_size=-1),
    "awq_with_kept_layers": Layout(kept=("down_proj", "layers.0.self_attn.o_proj")),
    "awq_with_kept_projections": Layout(
        kept=(*(f"model.layers.1.self_attn.{name}_proj" for name in "qkv"), "layers.2")
    ),
    "gptq": Layout("gptq"),
    "gptq_of_8_bits": Layout("gptq", bits=8),
    "gptq_v2": Layout("gptq", version="gptq_v2"),
    "gptq_whole_rows": Layout("gptq", group_size=-1),
    "gptq_with_activation_order": Layout("gptq", act_order=True, group_size=8),
    "gptq_of_8_bits_with_activation_order": Layout("gptq", bits=8, act_order=True),
}


MIXTURES = {
    "qwen3_moe, awq": ("qwen3_moe", Layout(group_size=16)),
    "qwen3_moe, gptq": ("qwen3_moe", Layout("gptq", group_size=16)),
    "mixtral, awq with kept routers": ("mixtral", Layout(kept=("gate",))),
    "mixtral, gptq of 8 bits": ("mixtral", Layout("gptq", bits=8, group_size=-1)),
}
"""Architecture and layout."""


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Harness(load_model(folder, **options), page_size=16).logits(PROMPT)


def typical_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The rms error of a token's logits, the median over tokens: a rounding sends some to another
    expert, and those have others."""
    return (ours - theirs).square().mean(dim=-1).sqrt().median()


def matrices(model: torch.nn.Module) -> dict[str, GroupwiseMatrix]:
    return {
        path.removesuffix(".matrix"): module
        for path, module in model.named_modules()
        if isinstance(module, GroupwiseMatrix)
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "llama_biased_tied"])
def test_a_quantized_checkpoint_means_what_its_twin_means(
    checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str, layout: Layout
) -> None:
    quantized, twin = quantize_checkpoint(checkpoint(architecture), tmp_path, layout)
    check_checkpoint(quantized)
    model, plain = load_model(quantized), load_model(twin)
    assert matrices(model)
    assert model.num_parameters == plain.num_parameters
    computed = Harness(model, page_size=16).logits(PROMPT)
    expected = Harness(plain, page_size=16).logits(PROMPT)
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


def test_weight_bytes_are_what_the_weights_take(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = load_model(checkpoint("llama"))
    assert weight_bytes(plain) == 4 * plain.num_parameters
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, Layout())
    tensors = load_file(quantized / "model.safetensors")
    packed = sum(t.nbytes for t in tensors.values())
    # the zeros take a byte here and half of one there
    zeros = sum(t.nbytes for name, t in tensors.items() if name.endswith("qzeros"))
    assert weight_bytes(load_model(quantized)) == packed + zeros


def test_a_split_inside_a_group_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The 96 inputs of down_proj are three groups of 32."""
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, Layout())
    with pytest.raises(ConfigError, match="between its quantization groups of 32"):
        load_model(quantized, tp=TensorParallel(0, 2))


@pytest.mark.parametrize(
    "layout",
    [Layout(group_size=16), Layout("gptq", 4, 16), Layout("gptq", 8, 16)],
    ids=lambda layout: f"{layout.method}{layout.bits}",
)
def test_each_rank_holds_its_part_of_the_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path, layout: Layout
) -> None:
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, layout)
    whole = matrices(load_model(quantized))
    ranks = [matrices(load_model(quantized, tp=TensorParallel(r, 2))) for r in range(2)]
    assert whole.keys() == ranks[0].keys()
    for path, matrix in whole.items():
        parts = [rank[path].dequantized() for rank in ranks]
        weight = matrix.dequantized()
        if path.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat(parts, dim=1), weight)
        elif path.endswith("gate_up_proj"):
            halves = [part.chunk(2) for part in parts]
            merged = [torch.cat([half[i] for half in halves]) for i in range(2)]
            assert torch.equal(torch.cat(merged), weight)
        else:  # query, key, value: 64, 32 and 32 rows
            pieces = [part.split([32, 16, 16]) for part in parts]
            merged = [torch.cat([piece[i] for piece in pieces]) for i in range(3)]
            assert torch.equal(torch.cat(merged), weight)


def test_activation_order_is_refused_with_ranks(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = Layout("gptq", act_order=True, group_size=16)
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, layout)
    with pytest.raises(ConfigError, match="desc_act"):
        load_model(quantized, tp=TensorParallel(0, 2))


def test_projections_of_different_orders_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = Layout("gptq", act_order=True, group_size=16)
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, layout)
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.v_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.*differ"):
        load_model(quantized)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "aqlm"}, "quantized .aqlm., which is not supported; supported are"),
    "awq_layout": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        "'gemv'",
    ),
    "awq_bits": ({"quant_method": "awq", "bits": 3, "group_size": 128}, "'bits': 3"),
    "gptq_bits": ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "'bits': 2"),
    "gptq_layout": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        "'marlin'",
    ),
    "mixed": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"x": {}}},
        "'dynamic'",
    ),
    "no_group": ({"quant_method": "gptq", "bits": 4}, "'group_size': None"),
    "odd_group": ({"quant_method": "gptq", "bits": 4, "group_size": 20}, "'group_size': 20"),
    "no_object": ("yes", "unknown"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("found", "match"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_early(
    checkpoint: Callable[[str], Path], tmp_path: Path, found: dict[str, Any], match: str
) -> None:
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, Layout())
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
    with pytest.raises(ConfigError, match=match):
        check_checkpoint(quantized)


def test_a_quantized_checkpoint_is_not_rounded_again(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, Layout())
    with pytest.raises(ConfigError, match=r"--quantization int8 needs a plain checkpoint"):
        check_checkpoint(quantized, quantization="int8")


def test_projections_computed_together_must_be_kept_together(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized, _ = quantize_checkpoint(checkpoint("llama"), tmp_path, Layout(kept=("k_proj",)))
    with pytest.raises(ConfigError, match=r"leaves model.layers.0.self_attn.k_proj unquantized"):
        load_model(quantized)


@pytest.mark.parametrize(("architecture", "layout"), MIXTURES.values(), ids=MIXTURES)
def test_a_quantized_mixture_of_experts_means_what_its_twin_means(
    checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str, layout: Layout
) -> None:
    quantized, twin = quantize_checkpoint(checkpoint(architecture), tmp_path, layout)
    model, plain = load_model(quantized), load_model(twin)
    assert {path.rpartition(".")[2] for path in matrices(model) if ".experts." in path} == {
        "gate_up_proj",
        "down_proj",
    }
    assert model.num_parameters == plain.num_parameters
    computed = Harness(model, page_size=16).logits(PROMPT)
    expected = Harness(plain, page_size=16).logits(PROMPT)
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


def test_each_rank_holds_its_part_of_quantized_experts(checkpoint: Callable[[str], Path]) -> None:
    """Rounded to 8 bits, a scale for each row of a rank's part: what both hold is what one rounds,
    up to that."""
    folder = checkpoint("qwen3_moe")
    plain = dict(load_model(folder).named_modules())
    for rank in range(2):
        model = load_model(folder, quantization="int8", tp=TensorParallel(rank, 2))
        for path, matrix in matrices(model).items():
            if ".experts." not in path:
                continue
            weight = plain[f"{path}.matrix"].weight.unflatten(0, (6, -1))
            if path.endswith("down_proj"):
                part = weight.chunk(2, dim=2)[rank]
            else:
                part = weight.unflatten(1, (2, -1)).chunk(2, dim=2)[rank].flatten(1, 2)
            step = part.abs().amax(dim=-1, keepdim=True) / 127
            error = (matrix.dequantized().unflatten(0, (6, -1)) - part).abs()
            assert (error <= 0.51 * step).all()


class PlainExpertsAlone(LayerKernels):
    multiplies_quantized_experts = False


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantization": "fp8"}, "8-bit floats of a mixture of experts"),
        ({"quantization": "int8", "kernels": PlainExpertsAlone()}, "on CPUs alone"),
    ],
)
def test_experts_in_forms_that_are_not_served_are_refused(
    checkpoint: Callable[[str], Path], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        load_model(checkpoint("qwen3_moe"), **options)


def test_experts_with_activation_order_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = Layout("gptq", act_order=True, group_size=16)
    quantized, _ = quantize_checkpoint(checkpoint("qwen3_moe"), tmp_path, layout)
    with pytest.raises(ConfigError, match="desc_act"):
        load_model(quantized)


# Rounding


@pytest.mark.parametrize(("quantization", "step"), [("int8", 1 / 127), ("int4", 1 / 7)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral"])
def test_rounding_moves_no_weight_by_more_than_half_a_step(
    checkpoint: Callable[[str], Path], architecture: str, quantization: str, step: float
) -> None:
    plain, rounded = (
        dict(load_model(checkpoint(architecture), quantization=q).named_modules())
        for q in ("auto", quantization)
    )
    compared = 0
    for path, matrix in rounded.items():
        if isinstance(matrix, GroupwiseMatrix):
            weight = plain[path].weight
            # of a row; a group has at most that, and the padding token's row is all 0
            largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
            error = (matrix.dequantized() - weight).abs()
            # at 4 bits outliers may be cut off, by at most a fifth of the range
            limit = 0.51 * step if quantization == "int8" else 0.21
            assert (error / largest).max() <= limit
            compared += 1
    assert compared == 4 * 3 + 1  # four matrices a layer, and the head


@pytest.mark.parametrize(
    "architecture", ["llama", "llama_biased_tied", "phi3", "gemma3_vision", "gemma4_e"]
)
def test_int8_keeps_the_logits(checkpoint: Callable[[str], Path], architecture: str) -> None:
    plain = logits(checkpoint(architecture))
    rounded = logits(checkpoint(architecture), quantization="int8")
    assert (rounded - plain).square().mean().sqrt() < 0.05 * plain.std()
    assert not torch.equal(rounded, plain)


@pytest.mark.parametrize("columns", [31, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_rounded_group_is_nearly_as_good_as_the_best_of_all_its_scales(
    columns: int, symmetric: bool
) -> None:
    """At 4 bits. Brute force: each scale of a fine grid, each zero; the least squared error that
    any has."""
    bits = 4
    generator = torch.Generator().manual_seed(columns)
    groups = torch.randn(3, 2, columns, generator=generator)
    codes, scales, zeros = quantize(groups, bits, symmetric)
    errors = (
        ((codes.double() - zeros.double()[..., None]) * scales.double()[..., None] - groups)
        .square()
        .sum(-1)
    )
    top = (1 << bits) - 1
    for row, group in np.ndindex(3, 2):
        weights = groups[row, group].double()
        candidates = [1 << (bits - 1)] if symmetric else range(top + 1)
        least = min(
            float(_error(weights, scale, zero, top))
            for zero in candidates
            for scale in np.linspace(0.3, 1.2, 60) * float(weights.abs().max()) / (top / 2)
        )
        assert float(errors[row, group]) < 1.35 * least


def _error(weights: torch.Tensor, scale: float, zero: int, top: int) -> torch.Tensor:
    codes = (weights / scale + zero).round().clamp(0, top)
    return ((codes - zero) * scale - weights).square().sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_zeros_and_of_equal_weights_are_exact(symmetric: bool) -> None:
    groups = torch.tensor([[[0.0] * 8, [0.5] * 8, [-0.25] * 8]])
    for bits in (4, 8):
        codes, scales, zeros = quantize(groups, bits, symmetric)
        decoded = (codes.float() - zeros.float()[..., None]) * scales.float()[..., None]
        torch.testing.assert_close(decoded, groups, rtol=1e-3, atol=1e-3)
        assert decoded.isfinite().all()


@pytest.mark.parametrize("columns", [1, 2, 7, 8])
def test_halves_come_back(columns: int) -> None:
    codes = torch.randint(0, 16, (5, columns), dtype=torch.uint8)
    assert torch.equal(unpack_halves(pack_halves(codes))[:, :columns], codes)
