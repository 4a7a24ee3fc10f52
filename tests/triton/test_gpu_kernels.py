"""Which kernel the GPU's layers call for which input, and that FlashInfer is called as its
signatures want."""

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.layers.kernels.gpu import FlashInferLayers, GpuKernels
from radixrt.layers.kernels.interface import LayerKernels
from tests.triton.numbers import DEVICE, assert_close, draw

REFERENCE = LayerKernels()
BF16 = torch.bfloat16


class FlashInferOnTorch:
    """Takes the calls that FlashInfer's own signatures take, and does in PyTorch what its pages
    say."""

    def __init__(self) -> None:
        self.flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(self.flashinfer, name))

        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [part for part in arguments if isinstance(part, torch.Tensor)]
            assert all(part.numel() for part in tensors), "CUDA refuses an empty grid"
            assert all(part.stride(-1) == 1 for part in tensors), "its kernels check this"
            self.called.append(name)
            return getattr(_OnTorch, name)(**signature.bind(*arguments, **options).arguments)

        return call


class _OnTorch:
    @staticmethod
    def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return REFERENCE.rms_norm(input, weight, eps, False)

    @staticmethod
    def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert input.dim() == 2, "the kernel takes no heads"
        return REFERENCE.rms_norm(input, weight, eps, True)

    @staticmethod
    def fused_add_rmsnorm(
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool = False,
    ) -> None:
        normed, summed = REFERENCE.add_rms_norm(input, residual, weight, eps, unit_offset)
        input.copy_(normed)
        residual.copy_(summed)

    @staticmethod
    def gemma_fused_add_rmsnorm(**arguments: Any) -> None:
        _OnTorch.fused_add_rmsnorm(**arguments, unit_offset=True)

    @staticmethod
    def apply_rope_with_cos_sin_cache_inplace(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        assert is_neox and cos_sin_cache.dtype == torch.float32
        heads = [part.view(len(part), -1, head_size) for part in (query, key)]
        for part, rotated in zip(
            heads, REFERENCE.rotate(positions, *heads, cos_sin_cache), strict=True
        ):
            part.copy_(rotated)

    @staticmethod
    def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
        return REFERENCE.gated_activation("silu", input)

    @staticmethod
    def gelu_and_mul(input: torch.Tensor) -> torch.Tensor:
        return REFERENCE.gated_activation("gelu", input)

    @staticmethod
    def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
        return REFERENCE.gated_activation("gelu_tanh", input)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInferOnTorch:
    stand_in = FlashInferOnTorch()
    monkeypatch.setattr(FlashInferLayers, "flashinfer", stand_in)
    return stand_in


def merged_heads(dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four query heads and two key heads of three tokens, inside one projection."""
    merged = draw(3, 8 * head_dim, dtype=dtype)
    query, key, _ = merged.split([4 * head_dim, 2 * head_dim, 2 * head_dim], dim=-1)
    return query.unflatten(-1, (4, head_dim)), key.unflatten(-1, (2, head_dim))


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms(flashinfer: FlashInferOnTorch, unit_offset: bool) -> None:
    kernels = GpuKernels(FlashInferLayers())
    hidden, residual, weight = (
        draw(3, 64, dtype=BF16),
        draw(3, 64, dtype=BF16),
        draw(64, dtype=BF16),
    )
    expected = REFERENCE.add_rms_norm(hidden, residual, weight, 1e-6, unit_offset)
    normed = REFERENCE.rms_norm(hidden, weight, 1e-6, unit_offset)
    assert_close(kernels.rms_norm(hidden, weight, 1e-6, unit_offset), normed)
    result = kernels.add_rms_norm(hidden, residual, weight, 1e-6, unit_offset)
    for ours, theirs in zip(result, expected, strict=True):
        assert_close(ours, theirs)
    gemma = "gemma_" if unit_offset else ""
    assert flashinfer.called == [f"{gemma}rmsnorm", f"{gemma}fused_add_rmsnorm"]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "unit_offset", "called"),
    [
        (64, BF16, False, ["rmsnorm"]),
        (64, BF16, True, []),  # Gemma 3's head norms: FlashInfer's kernel takes rows alone
        (20, BF16, False, []),  # no whole number of vectors
        (64, torch.float32, False, []),
    ],
)
def test_head_norms(
    flashinfer: FlashInferOnTorch,
    head_dim: int,
    dtype: torch.dtype,
    unit_offset: bool,
    called: list[str],
) -> None:
    kernels = GpuKernels(FlashInferLayers())
    _, key = merged_heads(dtype, head_dim)
    weight = draw(head_dim, dtype=dtype)
    expected = REFERENCE.rms_norm(key, weight, 1e-6, unit_offset)
    assert_close(kernels.rms_norm(key, weight, 1e-6, unit_offset), expected)
    assert flashinfer.called == called


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "by_flashinfer"),
    [(64, 64, True), (128, 64, True), (80, 80, False), (64, 24, False)],
)
def test_rotation(
    flashinfer: FlashInferOnTorch, head_dim: int, rotary_dim: int, by_flashinfer: bool
) -> None:
    kernels = GpuKernels(FlashInferLayers())
    query, key = merged_heads(BF16, head_dim)
    angles = torch.outer(torch.arange(9.0), torch.rand(rotary_dim // 2)).to(DEVICE)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([8, 0, 3], device=DEVICE)
    expected = REFERENCE.rotate(positions, query, key, table)
    for ours, theirs in zip(kernels.rotate(positions, query, key, table), expected, strict=True):
        assert_close(ours, theirs)
    assert bool(flashinfer.called) == by_flashinfer


def test_nothing_is_launched_for_no_rows(flashinfer: FlashInferOnTorch) -> None:
    kernels = GpuKernels(FlashInferLayers())
    rows, weight = draw(3, 64, dtype=BF16)[:0], draw(64, dtype=BF16)
    assert kernels.rms_norm(rows, weight, 1e-6, False).shape == (0, 64)
    assert [part.shape for part in kernels.add_rms_norm(rows, rows.clone(), weight, 1e-6, True)] == 2 * [(0, 64)]  # fmt: skip
    assert kernels.gated_activation("silu", rows).shape == (0, 32)
    heads = rows.view(0, 1, 64)
    table = draw(9, 64, dtype=torch.float32)
    positions = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert [part.shape for part in kernels.rotate(positions, heads, heads, table)] == 2 * [(0, 1, 64)]  # fmt: skip
    assert flashinfer.called == []


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("size", "by_flashinfer"), [(32, True), (30, False)])
def test_activations(
    flashinfer: FlashInferOnTorch, name: str, size: int, by_flashinfer: bool
) -> None:
    kernels = GpuKernels(FlashInferLayers())
    gate_up = draw(3, 2 * size, dtype=BF16)
    expected = REFERENCE.gated_activation(name, gate_up)
    assert_close(kernels.gated_activation(name, gate_up), expected)
    assert bool(flashinfer.called) == by_flashinfer
