"""Checkpoints of 8-bit floats with a scale a block of 128 x 128 mean what the same numbers in
float32 mean to transformers, in the layouts in which they are published."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import radixrt_kernels
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.latent_attention import LatentAttention
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.fp8_blocks import decoded
from radixrt.layers.quantization.groupwise import GroupwiseMatrix
from radixrt.models.checkpoint import check_checkpoint
from radixrt.models.loader import load_model
from radixrt.models.memory_need import memory_need
from tests.checkpoints import make_checkpoint
from tests.models.harness import Harness

torch.set_num_threads(1)

FP8 = torch.float8_e4m3fn
PROMPT = list(range(3, 43))
BLOCK = 128
LARGE = {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 144}
"""No multiples of 128, so that the last blocks are smaller."""
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LARGE, "kv_lora_rank": 136, "q_lora_rank": 130, "qk_rope_head_dim": 16, "initializer_range": 0.06},
    "glm4_moe_lite": {**LARGE, "q_lora_rank": None},
    "qwen3": LARGE,
    "qwen3_moe": LARGE,
    "minimax_m2": LARGE,
    "qwen3_next": LARGE,
}  # fmt: skip
PLAIN = ("embed_tokens", "lm_head", ".gate.", "shared_expert_gate", "in_proj_ba", "norm", "conv1d")
"""Parts of the names of matrices that publishers leave as they are."""


def encoded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, and the matrix that they mean: block by block."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=FP8)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    meant = torch.empty(rows, columns)
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        place = (
            slice(i * BLOCK, (i + 1) * BLOCK),
            slice(j * BLOCK, (j + 1) * BLOCK),
        )
        scales[i, j] = weight[place].abs().max() / 448
        codes[place] = (weight[place] / scales[i, j]).to(FP8)
        meant[place] = codes[place].float() * scales[i, j]
    return codes, scales, meant


def write(source: Path, folder: Path, **found: Any) -> tuple[Path, Path]:
    """The checkpoint in blocks, and its twin in float32."""
    quantized, twin = folder / "quantized", folder / "twin"
    for copy in (quantized, twin):
        shutil.copytree(source, copy)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        **found,
    }
    (quantized / "config.json").write_text(json.dumps(config))
    kept = (*PLAIN, *found.get("modules_to_not_convert", ()))
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if weight.ndim == 2 and not any(part in name for part in kept):
            stored[name], stored[f"{name}_scale_inv"], meant[name] = encoded(weight)
    save_file(stored, quantized / "model.safetensors")
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    return quantized, twin


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(request.param, folder / "source", **FAMILIES[request.param])
    return write(source, folder)


@torch.inference_mode()
def expected_logits(folder: Path) -> torch.Tensor:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return theirs(torch.tensor([PROMPT])).logits[0]


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Harness(load_model(folder, **options), page_size=16).logits(PROMPT)


def test_decoded_it_gives_the_logits_of_its_twin(pair: tuple[Path, Path]) -> None:
    quantized, twin = pair
    found = logits(quantized, quantization="plain")
    torch.testing.assert_close(found, expected_logits(twin), atol=1e-5, rtol=1e-5)


def quantized_layers(model: torch.nn.Module) -> dict[str, GroupwiseMatrix]:
    return {
        path.removesuffix(".matrix"): module
        for path, module in model.named_modules()
        if isinstance(module, GroupwiseMatrix)
    }


def test_by_default_it_is_rounded_to_8_bit_integers(pair: tuple[Path, Path]) -> None:
    """All but what publishers leave plain, by a scale for 128 columns of a row."""
    quantized, twin = pair
    model, plain = load_model(quantized), dict(load_model(twin).named_modules())
    layers = quantized_layers(model)
    every = {
        path.removesuffix(".matrix")
        for path, module in plain.items()
        if path.endswith(".matrix") and module.weight.shape[0] > 1
    }
    left = {path.rpartition(".")[2] for path in every - layers.keys()}
    assert left <= {"embed_tokens", "lm_head", "gate", "kv_b_proj", "in_proj_b", "in_proj_a"}
    for path, matrix in layers.items():
        assert (matrix.bits, matrix.group_size) == (8, min(BLOCK, matrix.columns))
        weight = plain[f"{path}.matrix"].weight
        largest = torch.stack([part.abs().amax(1) for part in weight.split(BLOCK, dim=1)], 1)
        step = (largest / 127).repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
        assert ((matrix.dequantized() - weight).abs() <= 0.52 * step + 4e-5).all()


def test_rounding_it_costs_less_than_8_bit_floats_did(pair: tuple[Path, Path]) -> None:
    quantized, _ = pair

    def error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Of a token in the middle: some go to other experts."""
        return (ours - theirs).square().mean(-1).sqrt().median()

    exact = logits(quantized, quantization="plain")
    of_floats = error(exact, logits(quantized.parent / "source"))
    assert 0 < error(logits(quantized), exact) < 0.5 * of_floats
    if radixrt_kernels.available():  # whose activations have 8 bits, too
        assert error(logits(quantized, kernels=NativeKernels()), exact) < of_floats


def test_the_absorbed_projection_is_not_rounded(pair: tuple[Path, Path]) -> None:
    quantized, _ = pair
    absorbed = [
        [b.kv_b_proj for b in load_model(quantized, quantization=q).modules() if isinstance(b, LatentAttention)]
        for q in ("auto", "plain")
    ]  # fmt: skip
    for ours, exact in zip(*absorbed, strict=True):
        assert torch.equal(ours.keys.weight, exact.keys.weight)
        assert torch.equal(ours.values.weight, exact.values.weight)


def test_what_fits_the_memory_is_not_refused(pair: tuple[Path, Path]) -> None:
    quantized, _ = pair
    for quantization in ("auto", "plain", "int4"):
        model = load_model(quantized, quantization=quantization)
        taken = sum(t.numel() * t.itemsize for t in model.state_dict().values())
        need = memory_need(quantized, quantization=quantization).in_memory
        assert 0.6 * taken < need <= taken
        assert model.num_parameters == load_model(pair[1]).num_parameters


# ---------------------------------------------------------------- DeepSeek's layout


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DeepSeek V3's: no list of plain modules, a layer behind the last that predicts a further token,
    sizes such as a latent of 512, and scales in another file than their weights."""
    folder = tmp_path_factory.mktemp("published")
    overrides = {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 136,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "hidden_size": 136,
        "initializer_range": 0.05,
    }
    source = make_checkpoint("deepseek_v3", folder / "source", **overrides)
    quantized, twin = write(source, folder)
    stored = load_file(quantized / "model.safetensors")
    further = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in stored.items()
        if ".layers.1." in name
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        further[f"model.layers.2.{name}.weight"] = torch.ones(136)
    further["model.layers.2.eh_proj.weight"] = torch.zeros(136, 272, dtype=FP8)
    further["model.layers.2.eh_proj.weight_scale_inv"] = torch.ones(2, 3)
    for name in ("embed_tokens", "shared_head.head"):
        further[f"model.layers.2.{name}.weight"] = torch.zeros(384, 136)
    stored |= further
    (quantized / "model.safetensors").unlink()
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in stored.items():
        parts[name.endswith("_scale_inv")][name] = tensor
    files = ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"]
    for file, tensors in zip(files, parts, strict=True):
        save_file(tensors, quantized / file)
    placed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (quantized / "model.safetensors.index.json").write_text(json.dumps(index))
    return quantized, twin


def test_the_published_layout_of_deepseek_v3_loads(published: tuple[Path, Path]) -> None:
    quantized, twin = published
    assert load_file(quantized / "model-00002-of-000002.safetensors")[
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    ].shape == (5, 2)  # 576 rows
    found = logits(quantized, quantization="plain")
    torch.testing.assert_close(found, expected_logits(twin), atol=1e-5, rtol=1e-5)
    assert logits(quantized).isfinite().all()


def test_each_rank_holds_its_part(published: tuple[Path, Path]) -> None:
    """Blocks of a projection may begin within a rank's part."""
    quantized, _ = published
    whole = dict(load_model(quantized, quantization="plain").named_modules())
    ranks = [
        dict(load_model(quantized, quantization="plain", tp=TensorParallel(r, 2)).named_modules())
        for r in range(2)
    ]
    for path, dim in (
        ("model.layers.1.self_attn.query_proj", 0),
        ("model.layers.1.self_attn.o_proj", 1),
        ("model.layers.0.mlp.down_proj", 1),
    ):
        parts = [rank[f"{path}.matrix"].weight for rank in ranks]
        assert torch.equal(torch.cat(parts, dim), whole[f"{path}.matrix"].weight)
    rounded = [quantized_layers(load_model(quantized, tp=TensorParallel(r, 2))) for r in range(2)]
    down = [rank["model.layers.0.mlp.down_proj"].dequantized() for rank in rounded]
    weight = whole["model.layers.0.mlp.down_proj.matrix"].weight
    assert (torch.cat(down, 1) - weight).abs().max() < 0.01 * weight.abs().max()


def test_whole_experts_on_a_rank_are_those_of_one_rank(published: tuple[Path, Path]) -> None:
    whole = quantized_layers(load_model(published[0]))
    ranks = [
        quantized_layers(load_model(published[0], tp=TensorParallel(r, 2, expert_groups=2)))
        for r in range(2)
    ]
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        parts = [rank[path].dequantized() for rank in ranks]
        assert torch.equal(torch.cat(parts), whole[path].dequantized())


def test_random_weights_have_its_form(published: tuple[Path, Path]) -> None:
    model = load_model(published[0], load_format="dummy")
    for matrix in quantized_layers(model).values():
        assert (matrix.bits, matrix.group_size) == (8, min(BLOCK, matrix.columns))


@pytest.mark.parametrize("block", [[1, 128], [64, 32]])
def test_blocks_may_have_other_sizes(block: list[int]) -> None:
    codes = torch.randn(100, 200).to(FP8)
    scales = torch.rand(-(-100 // block[0]), -(-200 // block[1])).bfloat16()
    stream = [("a.weight_scale_inv", scales), ("b.weight", torch.ones(3)), ("a.weight", codes)]
    found = dict(decoded(stream, (block[0], block[1])))
    for row, column in ((0, 0), (99, 199), (64, 31), (63, 128)):
        scale = scales[row // block[0], column // block[1]].float()
        assert found["a.weight"][row, column] == codes[row, column].float() * scale
    assert torch.equal(found["b.weight"], torch.ones(3))


def test_every_code_is_decoded() -> None:
    """NaN, and numbers below the smallest normal one, too."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = codes.float() * 0.37
    for kept in (codes, codes[~numbers.isnan()]):
        stream = {"a.weight": kept[None], "a.weight_scale_inv": torch.tensor([[0.37]])}
        found = dict(decoded(stream.items(), (128, 256)))["a.weight"][0]
        torch.testing.assert_close(found, kept.float() * 0.37, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("stream", "match"),
    [
        ({"a.weight": torch.zeros(4, 4).to(FP8)}, r"must hold a.weight_scale_inv. Download"),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, r"a.weight_scale_inv, but no weights"),
        (
            {"a.weight": torch.zeros(4, 4), "a.weight_scale_inv": torch.ones(1, 1)},
            "but no weights of 8-bit floats",
        ),
        (
            {"a.weight": torch.zeros(200, 4).to(FP8), "a.weight_scale_inv": torch.ones(1, 1)},
            r"is \[1, 1\], expected \[2, 1\] .* 'weight_block_size'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(stream: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        list(decoded(stream.items(), (128, 128)))


@pytest.mark.parametrize("block", [[128], [128, 0], ["128", 128], 128, [128, True]])
def test_blocks_of_no_size_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, block: Any
) -> None:
    quantized, _ = write(checkpoint("qwen3"), tmp_path, weight_block_size=block)
    with pytest.raises(ConfigError, match=r"such as .128, 128"):
        check_checkpoint(quantized)


def test_eight_bit_floats_that_the_config_does_not_mention_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized, twin = write(checkpoint("qwen3"), tmp_path)
    shutil.copy(twin / "config.json", quantized)
    with pytest.raises(ConfigError, match="F8_E4M3"):
        check_checkpoint(quantized)


def test_modules_that_are_not_converted_stay_as_they_are(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    kept = ["model.language_model.layers.1.mlp", "o_proj"]
    folder = checkpoint("qwen3")
    quantized, _ = write(folder, tmp_path, modules_to_not_convert=kept)
    layers = quantized_layers(load_model(quantized))
    assert "model.layers.0.mlp.down_proj" in layers
    assert not [path for path in layers if "layers.1.mlp" in path or "o_proj" in path]


class PlainExpertsAlone(LayerKernels):
    multiplies_quantized_experts = False


def test_where_experts_must_be_plain_the_error_says_how(published: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="--quantization plain"):
        load_model(published[0], kernels=PlainExpertsAlone())
    load_model(published[0], kernels=PlainExpertsAlone(), quantization="plain")
