"""Linear layers with 4- or 8-bit weights, and one scale and zero point per group; activations are
rounded to 8 bits.

The packed form has panels of 16 output features, like :mod:`radixrt_kernels.linear`, with four
consecutive codes of each feature. Each token has one activation scale per 128 columns, or per group
if groups are smaller.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixrt_kernels import native, trace
from radixrt_kernels.linear import PANEL
from radixrt_kernels.memory import advise_huge_pages

if native is not None:
    _linear, _look_up = native.groupwise_linear, native.groupwise_look_up
    _grouped_linear = native.grouped_groupwise_linear

COLUMNS_A_STEP = 8


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A packed matrix [rows, columns] with weights ``(code - zero) * scale``, or a stack of such
    matrices.

    The tensors of a stack have one more dimension, in front.
    """

    codes: torch.Tensor  # uint8 [panels, ceil(columns / 8) * bits / 4, PANEL, 4]
    scales: torch.Tensor  # float16 [panels, groups, PANEL]
    zeros: torch.Tensor  # uint8 [panels, groups, PANEL]
    rows: int
    columns: int
    bits: int
    group_size: int


def pack(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int
) -> PackedCodes:
    """Pack the codes of a matrix for the kernels.

    Args:
        codes: uint8 [rows, columns], each below ``2 ** bits``
        scales, zeros: float16 and uint8 [rows, groups]
        bits: 4 or 8
        group_size: columns per group: a multiple of 8, or at least the number of columns; the last
            group may be shorter
    """
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % COLUMNS_A_STEP, 0, -rows % PANEL))
    fours = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, PANEL)).transpose(1, 2)
    if bits == 4:
        fours = fours[:, ::2] | (fours[:, 1::2] << 4)
    packed = torch.empty(fours.shape, dtype=torch.uint8)
    advise_huge_pages(packed)
    return PackedCodes(
        packed.copy_(fours), _panels(scales), _panels(zeros), rows, columns, bits, group_size
    )


def replace_rows(
    matrix: PackedCodes,
    places: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
) -> None:
    """Put rows in place of others of a packed matrix of 8 bits.

    Args:
        places: int64 [n], the rows that are replaced.
        codes: uint8 [n, columns]
        scales, zeros: float16 and uint8 [n, groups]
    """
    if matrix.bits != 8:
        raise ValueError("rows are replaced in matrices of 8 bits")
    panels, lanes = places // PANEL, places % PANEL
    padded = F.pad(codes, (0, -codes.shape[1] % COLUMNS_A_STEP))
    matrix.codes[panels, :, lanes] = padded.unflatten(1, (-1, 4))
    matrix.scales[panels, :, lanes] = scales
    matrix.zeros[panels, :, lanes] = zeros


def stack(pack_one: Callable[[int], PackedCodes], count: int) -> PackedCodes:
    """Stack ``count`` matrices of one shape. ``pack_one(index)`` makes one at a time, so only one
    matrix exists twice."""
    one = pack_one(0)
    parts = (one.codes, one.scales, one.zeros)
    codes, scales, zeros = (part.new_empty((count, *part.shape)) for part in parts)
    advise_huge_pages(codes)
    for index in range(count):
        one = pack_one(index) if index else one
        codes[index], scales[index], zeros[index] = one.codes, one.scales, one.zeros
    return PackedCodes(codes, scales, zeros, one.rows, one.columns, one.bits, one.group_size)


def _panels(of_groups: torch.Tensor) -> torch.Tensor:
    """[rows, groups] -> [panels, groups, PANEL]"""
    padded = F.pad(of_groups, (0, 0, 0, -of_groups.shape[0] % PANEL))
    return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def linear(
    hidden: torch.Tensor,
    matrix: PackedCodes,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by a quantized matrix.

    Args:
        hidden: [num_tokens, columns], float32, bfloat16 or float16
        matrix: the packed matrix
        bias: [rows] of the same dtype, or None
        output_dtype: None: that of ``hidden``; or float32, in which sums are not rounded, without
            bias

    Returns:
        [num_tokens, rows] of the same dtype, or of ``output_dtype``

    Raises:
        ValueError: the shapes do not fit.

    Example, one group per row:
        >>> import torch
        >>> codes = torch.tensor([[8, 9, 10, 7, 8, 8, 8, 8], [8, 8, 8, 8, 8, 8, 8, 12]], dtype=torch.uint8)
        >>> scales = torch.tensor([[0.5], [0.25]], dtype=torch.float16)
        >>> zeros = torch.tensor([[8], [8]], dtype=torch.uint8)
        >>> linear(torch.ones(1, 8), pack(codes, scales, zeros, bits=4, group_size=8))
        tensor([[1., 1.]])
    """
    output = hidden.new_empty((hidden.shape[0], matrix.rows), dtype=output_dtype)
    m = matrix
    trace.call(
        _linear, hidden, m.codes, m.scales, m.zeros, m.rows, m.bits, m.group_size, bias, output
    )
    return output


def grouped_linear(
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    starts: torch.Tensor,
    stack: PackedCodes,
    bias: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each input row by one matrix of a stack.

    Args:
        hidden: [num_tokens, columns], float32, bfloat16 or float16
        tokens: int32 [n], the token of each input row; None: the rows of ``hidden``
        starts: int32 [matrices + 1]; rows ``starts[i]`` to ``starts[i + 1]`` are multiplied by
            matrix ``i``
        stack: the packed matrices
        bias: [matrices, rows] of the same dtype, or None
        output: as of :func:`radixrt_kernels.linear.linear`

    Returns:
        [n, rows] of the same dtype; ``rows`` is that of one matrix
    """
    s = stack
    if output is None:
        output = hidden.new_empty((len(hidden) if tokens is None else len(tokens), s.rows))
    trace.call(
        _grouped_linear,
        hidden, tokens, starts, s.codes, s.scales, s.zeros, s.rows, s.bits, s.group_size, output, bias,
    )  # fmt: skip
    return output


def look_up(matrix: PackedCodes, wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode the rows ``wanted`` ([n] int64) of a matrix. Returns [n, columns] of ``dtype``."""
    output = torch.empty((wanted.shape[0], matrix.columns), dtype=dtype)
    m = matrix
    trace.call(_look_up, m.codes, m.scales, m.zeros, m.rows, m.bits, m.group_size, wanted, output)
    return output
