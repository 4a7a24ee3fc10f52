"""Rounds activations to float8_e4m3fn with one scale per token, for the left operand of an fp8
product."""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of, warps_for

LARGEST = 448.0
"""The largest value of float8_e4m3fn."""

SMALLEST_SCALE = 1e-12
"""The smallest scale, for rows of zeros."""


@triton.jit
def _quantize_rows_kernel(
    hidden, quantized, scales, row_stride, columns,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    x = tl.load(hidden + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    y = tl.clamp(tl.div_rn(x, scale + tl.zeros_like(x)), -LARGEST, LARGEST)
    tl.store(quantized + row * columns + column, y.to(quantized.dtype.element_ty), mask=inside)


def quantize_rows(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [tokens, columns] with contiguous rows. Returns float8_e4m3fn of the same shape, and
    scales [tokens, 1] float32."""
    tokens, columns = hidden.shape
    quantized = torch.empty((tokens, columns), dtype=torch.float8_e4m3fn, device=hidden.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=hidden.device)
    block = block_of(columns)
    if tokens:
        _quantize_rows_kernel[(tokens,)](
            hidden, quantized, scales, hidden.stride(0), columns,
            LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, COLUMNS=block, num_warps=warps_for(block),
        )  # fmt: skip
    return quantized, scales
