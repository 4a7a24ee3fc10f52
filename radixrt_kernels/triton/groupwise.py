"""Products with 4- or 8-bit weights, which the kernel decodes before the tensor cores.

Few tokens: memory is the limit, and the product reads a quarter or half of the bytes of 16-bit
weights. Many tokens: the tensor cores are the limit. Decoding the weights again for every block of
tokens would then cost more than decoding them once, so callers use :func:`dequantize` and a normal
product.

At 4 bits a byte has two columns at a distance of ``half`` columns (see :func:`pack`). The two
halves of a block of codes are therefore multiplied by two adjacent blocks of activations, without
interleaving in registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of

WIDEST_HALF = 64
NARROWEST_HALF = 16
"""Minimum number of inner columns of a tensor-core product."""


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A packed matrix: ``weight[row, column] = (code - zero) * scale``, with zero and scale of the
    column's group."""

    codes: torch.Tensor  # uint8 [rows, blocks * half] at 4 bits, [rows, columns] at 8
    scales: torch.Tensor  # float16 [rows, groups]
    zeros: torch.Tensor  # uint8 [rows, groups]
    rows: int
    columns: int
    bits: int
    group_size: int
    half: int
    """Columns that are decoded together; they are in one group."""


def half_of(columns: int, group_size: int) -> int | None:
    """The largest power of two of columns that are always in one group; None: too small for the
    kernels."""
    half = WIDEST_HALF
    if group_size < columns:
        half = min(half, group_size & -group_size)
    return half if half >= NARROWEST_HALF else None


def pack(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int
) -> PackedCodes:
    """Pack codes for the kernels.

    Args:
        codes: uint8 [rows, columns], one code per element
        scales: float16 [rows, groups]
        zeros: uint8 [rows, groups]
        bits: 4 or 8
        group_size: columns per group; ``half_of`` returns None for unsupported sizes.
    """
    rows, columns = codes.shape
    half = half_of(columns, group_size)
    if half is None:
        raise ValueError(f"groups of {group_size} columns are too small for the kernels")
    if bits == 4:
        missing = -columns % (2 * half)
        blocks = torch.nn.functional.pad(codes, (0, missing)).unflatten(1, (-1, 2, half))
        codes = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)
    return PackedCodes(
        codes.contiguous(), scales.contiguous(), zeros.contiguous(), rows, columns, bits, group_size, half
    )  # fmt: skip


@triton.jit
def _weights(codes, scales, zeros, row, inside, groups, group, DTYPE: tl.constexpr):
    """Decode codes [rows, half] of one group to the activations' dtype."""
    place = row * groups + group
    scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
    return ((codes.to(tl.float32) - zero[:, None]) * scale[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    hidden, codes, scales, zeros, bias, output,
    tokens, rows, columns, row_bytes, groups, group_size, hidden_stride,
    BITS: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real_row, real_token = row < rows, token < tokens
    place = tl.arange(0, HALF)
    hidden_at = hidden + token[:, None] * hidden_stride + place[None, :]
    codes_at = codes + row[:, None] * row_bytes + place[None, :]
    dtype: tl.constexpr = hidden.dtype.element_ty
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    step: tl.constexpr = 2 * HALF if BITS == 4 else HALF
    for start in range(0, columns, step):
        column = start + place
        x = tl.load(
            hidden_at + start, mask=real_token[:, None] & (column < columns)[None, :], other=0.0
        )
        if BITS == 4:
            both = tl.load(codes_at + start // 2, mask=real_row[:, None], other=0)
            first = _weights(
                both & 15, scales, zeros, row, real_row, groups, start // group_size, dtype
            )
            sums = tl.dot(x, tl.trans(first), sums, input_precision="ieee")
            column += HALF
            x = tl.load(
                hidden_at + start + HALF,
                mask=real_token[:, None] & (column < columns)[None, :], other=0.0,
            )  # fmt: skip
            # After the last column the activations are 0; the group index only has to be valid.
            group = tl.minimum((start + HALF) // group_size, groups - 1)
            second = _weights(both >> 4, scales, zeros, row, real_row, groups, group, dtype)
            sums = tl.dot(x, tl.trans(second), sums, input_precision="ieee")
        else:
            inside = real_row[:, None] & (column < columns)[None, :]
            code = tl.load(codes_at + start, mask=inside, other=0)
            w = _weights(code, scales, zeros, row, real_row, groups, start // group_size, dtype)
            sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
    result = sums.to(dtype)
    if HAS_BIAS:
        added = tl.load(bias + row, mask=real_row, other=0.0).to(tl.float32)
        result = (sums + added[None, :]).to(dtype)
    output_at = output + token[:, None] * rows + row[None, :]
    tl.store(output_at, result, mask=real_token[:, None] & real_row[None, :])


@triton.jit
def _dequantize_kernel(
    codes, scales, zeros, output, rows, columns, row_bytes, groups, group_size,
    BITS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < rows
    place = tl.arange(0, HALF)
    step: tl.constexpr = 2 * HALF if BITS == 4 else HALF
    start = tl.program_id(1) * step
    byte = (start // 2 if BITS == 4 else start) + place
    code = tl.load(
        codes + row[:, None] * row_bytes + byte[None, :],
        mask=real[:, None] & (byte < row_bytes)[None, :], other=0,
    )  # fmt: skip
    dtype: tl.constexpr = output.dtype.element_ty
    for part in tl.static_range(2 if BITS == 4 else 1):
        column = start + part * HALF + place
        part_codes = code
        if BITS == 4:
            part_codes = (code >> (4 * part)) & 15
        group = tl.minimum((start + part * HALF) // group_size, groups - 1)
        weights = _weights(part_codes, scales, zeros, row, real, groups, group, dtype)
        output_at = output + row[:, None] * columns + column[None, :]
        tl.store(output_at, weights, mask=real[:, None] & (column < columns)[None, :])


def linear(hidden: torch.Tensor, packed: PackedCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """hidden [tokens, columns], bias [rows] -> [tokens, rows]. The weights are decoded inside the
    product."""
    tokens = hidden.shape[0]
    output = torch.empty((tokens, packed.rows), dtype=hidden.dtype, device=hidden.device)
    if not tokens:
        return output
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    block_tokens = max(16, block_of(tokens, 64))
    block_rows = 32 if packed.rows <= 8192 and block_tokens == 16 else 64
    grid = (triton.cdiv(packed.rows, block_rows), triton.cdiv(tokens, block_tokens))
    _linear_kernel[grid](
        hidden, packed.codes, packed.scales, packed.zeros, hidden if bias is None else bias, output,
        tokens, packed.rows, packed.columns, packed.codes.shape[1], packed.scales.shape[1],
        packed.group_size, hidden.stride(0),
        BITS=packed.bits, HALF=packed.half, HAS_BIAS=bias is not None,
        TOKENS=block_tokens, ROWS=block_rows, num_warps=4, num_stages=4,
    )  # fmt: skip
    return output


def dequantize(packed: PackedCodes, dtype: torch.dtype) -> torch.Tensor:
    """Return the decoded weights [rows, columns]."""
    shape = (packed.rows, packed.columns)
    output = torch.empty(shape, dtype=dtype, device=packed.codes.device)
    step = 2 * packed.half if packed.bits == 4 else packed.half
    block_rows = 32
    grid = (triton.cdiv(packed.rows, block_rows), triton.cdiv(packed.columns, step))
    _dequantize_kernel[grid](
        packed.codes, packed.scales, packed.zeros, output,
        packed.rows, packed.columns, packed.codes.shape[1], packed.scales.shape[1],
        packed.group_size,
        BITS=packed.bits, HALF=packed.half, ROWS=block_rows, num_warps=4,
    )  # fmt: skip
    return output
