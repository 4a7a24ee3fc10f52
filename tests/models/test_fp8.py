"""8-bit floats: checkpoints that have them, plain ones rounded to them, and the product that a GPU
computes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.base.errors import ConfigError
from radixrt.layers.quantization import fp8
from radixrt.layers.quantization.fp8 import FP8, Fp8Matrix, quantize_rows
from radixrt.layers.quantization.scheme import ROUNDINGS
from radixrt.models.checkpoint import check_checkpoint
from radixrt.models.loader import load_model
from tests.models.harness import Harness

PROMPT = list(range(3, 33))
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def channel(dynamic: bool = True, **others: Any) -> dict[str, Any]:
    """compressed-tensors, a scale a channel."""
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": dynamic},
        "targets": ["Linear"],
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **others,
    }


def tensor(**others: Any) -> dict[str, Any]:
    found = channel(**others)
    found["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    return found


LAYOUTS = {
    "compressed-tensors, channels": channel(),
    "compressed-tensors, tensors, calibrated": tensor(dynamic=False),
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8, calibrated, with kept layers": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head", "down_proj"],
    },
}


def write(source: Path, folder: Path, found: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint with 8-bit weights, and its plain twin with the same numbers."""
    quantized, twin = folder / "quantized", folder / "twin"
    for copy in (quantized, twin):
        shutil.copytree(source, copy)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": found}
    (quantized / "config.json").write_text(json.dumps(config))
    kept = tuple(found.get("ignored_layers", ()))
    a_row = found["quant_method"] != "fp8" and (
        found["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    )
    one = torch.Size([]) if found["quant_method"] == "fp8" else torch.Size([1])
    calibrated = found.get("activation_scheme") == "static" or (
        found["quant_method"] != "fp8"
        and not found["config_groups"]["group_0"]["input_activations"]["dynamic"]
    )
    packed, plain = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        projection = name.split(".")[-2]
        packed[name] = plain[name] = weight
        if projection not in PROJECTIONS or projection in kept or not name.endswith("weight"):
            continue
        limit = weight.abs().amax(dim=1, keepdim=True) if a_row else weight.abs().amax()
        scale = limit / 448
        codes = (weight / scale).to(FP8)
        prefix = name.removesuffix("weight")
        packed[name] = codes
        packed[f"{prefix}weight_scale"] = scale if a_row else scale.reshape(one)
        if calibrated:
            packed[f"{prefix}input_scale"] = torch.ones(one)
        plain[name] = codes.float() * scale
    save_file(packed, quantized / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    return quantized, twin


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Harness(load_model(folder, **options), page_size=16).logits(PROMPT)


@pytest.fixture
def exact_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let activations be what they are, so that what is left is what the weights mean."""
    one = torch.ones(())
    monkeypatch.setattr(fp8, "quantize_rows", lambda numbers: (numbers, one))


@pytest.mark.parametrize("found", LAYOUTS.values(), ids=LAYOUTS)
def test_a_checkpoint_means_what_its_twin_means(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    exact_activations: None,
    found: dict[str, Any],
) -> None:
    quantized, twin = write(checkpoint("llama"), tmp_path, found)
    check_checkpoint(quantized)
    model = load_model(quantized)
    assert any(isinstance(module, Fp8Matrix) for module in model.modules())
    assert model.num_parameters == load_model(twin).num_parameters
    torch.testing.assert_close(logits(quantized), logits(twin), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_rounding_a_plain_checkpoint_changes_little(
    checkpoint: Callable[[str], Path], load_format: str
) -> None:
    plain = logits(checkpoint("llama"), load_format=load_format)
    rounded = logits(checkpoint("llama"), load_format=load_format, quantization="fp8")
    assert 0 < (rounded - plain).norm() / plain.norm() < 0.25  # a dozen products deep


def test_a_product_is_off_by_what_three_bits_of_mantissa_cost() -> None:
    """A number is off by 2**-4 at most, by 2.6 % on average (in squares), and so are both sides of
    a product."""
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(n, 256, generator=generator) for n in (64, 32))
    matrix = Fp8Matrix(64, 256, ROUNDINGS["fp8"])
    codes, scales = quantize_rows(weight)
    matrix.codes.copy_(codes)
    matrix.scales.copy_(scales.squeeze(-1))
    exact = hidden @ weight.t()
    assert 0.02 < (matrix.multiply(hidden, None) - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, "block"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        (channel(kv_cache_scheme={"num_bits": 8}), "compressed-tensors"),
        (channel(format="pack-quantized"), "compressed-tensors"),
        (channel(ignore=["re:.*gate"]), "compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_other_forms_are_refused_by_name(
    checkpoint: Callable[[str], Path], tmp_path: Path, found: dict[str, Any], names: str
) -> None:
    folder = tmp_path / "refused"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": found}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=names):
        check_checkpoint(folder)


def test_a_row_is_rounded_by_a_scale_of_its_own() -> None:
    numbers = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 7.0]).unsqueeze(-1)
    codes, scales = quantize_rows(numbers)
    relative = (codes.float() * scales - numbers).abs() / numbers.abs().clamp(min=1e-30)
    large = numbers.abs() > numbers.abs().amax(dim=1, keepdim=True) / 64
    assert relative[large & (numbers != 0)].max() <= 2.0**-4
    assert not codes[3].float().any()
