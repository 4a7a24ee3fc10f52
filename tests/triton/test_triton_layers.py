"""The Triton kernels compute what the PyTorch references compute: on a GPU compiled, else
interpreted on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.layers.kernels.interface import GATED_ACTIVATIONS, LayerKernels
from radixrt_kernels.triton.activation import gated_activation
from radixrt_kernels.triton.norm import add_rms_norm, rms_norm
from radixrt_kernels.triton.rotary import rotate
from tests.triton.numbers import DEVICE, assert_close, draw

REFERENCE = LayerKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (3, 100), (5, 4, 64), (2, 3, 80), (2, 5000)])
def test_rms_norm_rounds_as_the_reference(
    shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype
) -> None:
    hidden, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    expected = REFERENCE.rms_norm(hidden, weight, 1e-6, unit_offset)
    assert_close(rms_norm(hidden, weight, 1e-6, unit_offset), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normed_inside_a_merged_projection(dtype: torch.dtype) -> None:
    merged, weight = draw(3, 4 * 64 + 2 * 64, dtype=dtype), draw(64, dtype=dtype)
    keys = merged[:, 4 * 64 :].unflatten(-1, (2, 64))
    expected = REFERENCE.rms_norm(keys, weight, 1e-5, False)
    assert_close(rms_norm(keys, weight, 1e-5, False), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 4100)])
def test_the_residual_is_added_and_kept(
    shape: tuple[int, int], unit_offset: bool, dtype: torch.dtype
) -> None:
    hidden, residual, weight = (draw(*size, dtype=dtype) for size in (shape, shape, shape[1:]))
    expected = REFERENCE.add_rms_norm(hidden, residual, weight, 1e-6, unit_offset)
    normed, summed = add_rms_norm(hidden.clone(), residual.clone(), weight, 1e-6, unit_offset)
    assert torch.equal(summed, expected[1])
    assert_close(normed, expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (3, 1, 80, 80), (2, 2, 96, 48), (1, 1, 128, 32), (5, 5, 16, 12)],
)
def test_rotation_inside_a_merged_projection(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    merged = draw(6, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(rotary_dim // 2)).to(DEVICE)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 49, 7, 7, 30, 1], device=DEVICE)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]

    def parts(of: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(-1, (-1, head_dim)) for part in of.split(sizes, dim=-1)]

    query, key, value = parts(merged.clone())
    expected = REFERENCE.rotate(positions, query, key, table)
    rotated = merged.clone()
    result = rotate(positions, *parts(rotated)[:2], table)
    for ours, theirs in zip(result, expected, strict=True):
        assert_close(ours, theirs)
    assert torch.equal(parts(rotated)[2], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fusing_a_product_with_a_sum_is_within_what_is_compared(dtype: torch.dtype) -> None:
    """Triton does so on a GPU and not when it is interpreted; ``first * cos - second * sin``
    cancels."""
    for seed in range(100):
        first, second = (draw(64, dtype=dtype, seed=1000 * half + seed) for half in (1, 2))
        angles = torch.rand(64, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * 6.3
        cos, sin = angles.cos(), angles.sin()
        product = second.float() * sin
        fused = (first.double() * cos.double() - product.double()).float()
        plain = first.float() * cos - product
        assert_close(fused.to(dtype), plain.to(dtype))
        with pytest.raises(AssertionError):
            assert_close((plain + 1e-2).to(dtype), plain.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(GATED_ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 2), (5, 66), (3, 4096)])
def test_gated_activations(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = draw(*shape, dtype=dtype) * 4
    exact = name == "clamped_swiglu"  # in halves, the reference rounds after each of its five steps
    expected = REFERENCE.gated_activation(name, gate_up.float() if exact else gate_up).to(dtype)
    near_zero = 8.0 if dtype == torch.float32 else None  # the reference's 1 + tanh(x) cancels
    assert_close(gated_activation(name, gate_up), expected, near_zero=near_zero)


def test_empty_batches_launch_nothing() -> None:
    empty = draw(0, 64, dtype=torch.bfloat16)
    assert rms_norm(empty, draw(64, dtype=torch.bfloat16), 1e-6, False).shape == (0, 64)
    assert gated_activation("silu", empty).shape == (0, 32)
