"""Quantized matrices multiply on a GPU as their reference does, for every layout that checkpoints
bring."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.layers.kernels import gpu
from radixrt.layers.kernels.gpu import GpuKernels, TritonGroupwiseMatrix
from radixrt.layers.quantization.groupwise import GroupwiseMatrix, pack_halves
from radixrt.layers.quantization.scheme import QuantizationScheme
from tests.triton.numbers import DEVICE, draw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_matrix(
    rows: int, columns: int, bits: int, group_size: int | None, dtype: torch.dtype
) -> GroupwiseMatrix:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    matrix = GroupwiseMatrix(rows, columns, QuantizationScheme("rounding", bits, group_size))
    torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    matrix.codes.copy_(pack_halves(codes) if bits == 4 else codes)
    shape = (rows, matrix.num_groups)
    matrix.zeros.copy_(torch.randint(0, 1 << bits, shape, generator=generator))
    matrix.scales.copy_(torch.rand(shape, generator=generator) * 2.0**-bits)
    return matrix.to(DEVICE)


def assert_multiplies(matrix: GroupwiseMatrix, tokens: int, dtype: torch.dtype) -> None:
    hidden, bias = draw(tokens, matrix.columns, dtype=dtype), draw(matrix.rows, dtype=dtype)
    packed = GpuKernels(None).pack(matrix)
    assert isinstance(packed, TritonGroupwiseMatrix)
    for added in (None, bias):
        exact = matrix.multiply(hidden, added).float()
        size = exact.abs().max()
        error = (packed.multiply(hidden, added).float() - exact).abs().max()
        assert error <= size * (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [(40, 128, 32), (33, 200, 16), (70, 96, None), (16, 320, 128), (8, 50, None)],
)
def test_products(
    rows: int, columns: int, group_size: int | None, bits: int, dtype: torch.dtype
) -> None:
    matrix = random_matrix(rows, columns, bits, group_size, dtype)
    for tokens in (1, 19):
        assert_multiplies(matrix, tokens, dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_tokens_meet_decoded_weights(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(gpu, "DECODED_FROM_TOKENS", 5)
    assert_multiplies(random_matrix(40, 200, bits, 16, torch.bfloat16), 6, torch.bfloat16)


def test_columns_in_another_order() -> None:
    matrix = random_matrix(24, 64, 4, 16, torch.float32)
    matrix.column_order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert_multiplies(matrix, 3, torch.float32)


def test_an_embedding_is_looked_up() -> None:
    matrix = random_matrix(30, 96, 8, 32, torch.bfloat16)
    rows = torch.tensor([3, 29, 0, 3], device=DEVICE)
    packed = GpuKernels(None).pack(matrix)
    assert torch.equal(packed.look_up(rows), matrix.look_up(rows))


def test_groups_too_small_for_the_kernels_keep_the_reference() -> None:
    matrix = random_matrix(8, 64, 4, 8, torch.float32)
    assert GpuKernels(None).pack(matrix) is matrix
