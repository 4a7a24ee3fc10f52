"""The GPU's 8-bit product gets what it wants, and quantizes activations as the reference does."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.layers.quantization import fp8
from radixrt.layers.quantization.fp8 import Fp8Matrix, ScaledFp8Matrix
from radixrt.layers.quantization.scheme import ROUNDINGS
from radixrt_kernels.triton.fp8 import quantize_rows
from tests.triton.numbers import DEVICE, draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (3, 4096)])
def test_activations_are_rounded_as_the_reference_rounds_them(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    hidden = draw(*shape, dtype=dtype) * 3
    hidden[0] = 0
    codes, scales = quantize_rows(hidden)
    expected, expected_scales = fp8.quantize_rows(hidden)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A scale that is off in its last bit moves a number that lies between two codes.
    assert (codes.float() != expected.float()).float().mean() < 1e-3


def scaled_mm_by_definition(
    left: torch.Tensor, right: torch.Tensor, *, scale_a: Any, scale_b: Any, out_dtype: torch.dtype
) -> torch.Tensor:
    """What torch's page says of ``_scaled_mm``, and what it demands."""
    assert left.dtype == right.dtype == torch.float8_e4m3fn
    assert left.is_contiguous() and right.t().is_contiguous(), "row-major by column-major"
    assert left.shape[1] % 16 == 0 and right.shape[1] % 16 == 0
    assert scale_a.shape == (len(left), 1) and scale_b.shape == (1, right.shape[1])
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    assert out_dtype == torch.bfloat16
    return ((left.float() @ right.float()) * scale_a * scale_b).to(out_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_product_is_the_references(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_by_definition)
    with torch.device(DEVICE):
        matrix = Fp8Matrix(48, 64, ROUNDINGS["fp8"])
    codes, scales = fp8.quantize_rows(draw(48, 64, dtype=torch.float32))
    matrix.codes.copy_(codes)
    matrix.scales.copy_(scales.squeeze(-1))
    hidden, bias = draw(5, 64, dtype=dtype), draw(48, dtype=dtype)
    packed = ScaledFp8Matrix(matrix)
    for added in (None, bias):
        expected = matrix.multiply(hidden, added).float()
        ours = packed.multiply(hidden, added).float()
        assert (ours - expected).abs().max() <= expected.abs().max() * 2**-6
