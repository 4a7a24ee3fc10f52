"""RMSNorm (Zhang & Sennrich, 2019), alone and after a residual addition, with the rounding of the
references."""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of, rows_of, warps_for

ELEMENTS = 1024
"""Elements per program. It normalizes several short rows: the heads of a query-key norm have 64 to
256 features each."""


@triton.jit
def _norm(summed, weight, eps, size, UNIT_OFFSET: tl.constexpr):
    """Normalize rows in the activations' dtype: [rows, size] -> [rows, size]."""
    x = summed.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / size
    x = x * tl.rsqrt(mean_square + eps)[:, None]
    if UNIT_OFFSET:
        return (x * (1.0 + weight.to(tl.float32))[None, :]).to(summed.dtype)
    rounded = x.to(summed.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)[None, :]).to(summed.dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    hidden, weight, normed, rows, heads, row_stride, head_stride, size, eps,
    UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    start = (row // heads) * row_stride + (row % heads) * head_stride
    x = tl.load(hidden + start[:, None] + column[None, :], mask=inside, other=0.0)
    w = tl.load(weight + column, mask=column < size, other=0.0)
    y = _norm(x, w, eps, size, UNIT_OFFSET)
    tl.store(normed + row[:, None] * size + column[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    hidden, residual, weight, rows, hidden_stride, residual_stride, size, eps,
    UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    hidden_at = hidden + row[:, None] * hidden_stride + column[None, :]
    residual_at = residual + row[:, None] * residual_stride + column[None, :]
    x = tl.load(hidden_at, mask=inside, other=0.0)
    r = tl.load(residual_at, mask=inside, other=0.0)
    summed = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
    w = tl.load(weight + column, mask=column < size, other=0.0)
    tl.store(residual_at, summed, mask=inside)
    tl.store(hidden_at, _norm(summed, w, eps, size, UNIT_OFFSET), mask=inside)


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> torch.Tensor:
    """Compute ``hidden / rms(hidden) * weight`` over the last dimension, in float32.

    Args:
        hidden: [rows, size] or [rows, heads, size], may be a view of a merged projection
        weight: [size]
        unit_offset: True: multiply by ``1 + weight`` and round once (Gemma); False: also round
            before the multiplication (Llama)

    Returns:
        as hidden, contiguous
    """
    rows, heads, row_stride, head_stride = rows_of(hidden)
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    size = hidden.shape[-1]
    tile = _tile(size)
    if rows:
        _rms_norm_kernel[(triton.cdiv(rows * heads, tile),)](
            hidden, weight, normed, rows * heads, heads, row_stride, head_stride, size, eps,
            UNIT_OFFSET=unit_offset, ROWS=tile, SIZE=block_of(size),
            num_warps=warps_for(tile * size),
        )  # fmt: skip
    return normed


def add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set ``residual += hidden``, rounded to its dtype, and ``hidden = rms_norm(residual)``, both
    in place.

    Args:
        hidden, residual: [rows, size] with contiguous rows

    Returns:
        (hidden, residual)
    """
    rows, _, hidden_stride, _ = rows_of(hidden)
    _, _, residual_stride, _ = rows_of(residual)
    size = hidden.shape[-1]
    tile = _tile(size)
    if rows:
        _add_rms_norm_kernel[(triton.cdiv(rows, tile),)](
            hidden, residual, weight, rows, hidden_stride, residual_stride, size, eps,
            UNIT_OFFSET=unit_offset, ROWS=tile, SIZE=block_of(size),
            num_warps=warps_for(tile * size),
        )  # fmt: skip
    return hidden, residual


def _tile(size: int) -> int:
    """Rows per program."""
    return max(1, ELEMENTS // block_of(size))
