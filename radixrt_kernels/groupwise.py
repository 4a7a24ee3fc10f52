"""Linear layers of 4- or 8-bit codes with a scale and a zero a group; activations are rounded to 8 bits on the way in.

The packed form has panels of 16 output features like that of :mod:`radixrt_kernels.linear`, four codes of each following each
other. Every 128 columns of a token (fewer where groups are smaller) get an activation scale of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixrt_kernels import native, tape
from radixrt_kernels.linear import PANEL
from radixrt_kernels.memory import advise_huge_pages

if native is not None:
    _linear, _look_up = native.groupwise_linear, native.groupwise_look_up
    _grouped_linear = native.grouped_groupwise_linear

COLUMNS_A_STEP = 8


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A matrix of ``rows`` by ``columns`` whose weights are ``(code - zero) * scale``.

    Or a stack of such matrices: then the tensors have one dimension more, in front.
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
    """
    Args:
        codes: uint8 [rows, columns], each below 2 ** bits.
        scales, zeros: float16 and uint8 [rows, groups]
        bits: 4 or 8.
        group_size: a multiple of 8, or at least the number of columns; the last group may be shorter.
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


def stack(pack_one: Callable[[int], PackedCodes], count: int) -> PackedCodes:
    """``count`` matrices of one shape in one place; ``pack_one`` makes each by its index, so that there are never two copies."""
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
    hidden: torch.Tensor, matrix: PackedCodes, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_tokens, columns] -> [num_tokens, rows], float32, bfloat16 or float16; ``bias`` [rows] of the same."""
    output = hidden.new_empty((hidden.shape[0], matrix.rows))
    m = matrix
    tape.call(
        _linear, hidden, m.codes, m.scales, m.zeros, m.rows, m.bits, m.group_size, bias, output
    )
    return output


def grouped_linear(
    hidden: torch.Tensor, tokens: torch.Tensor | None, starts: torch.Tensor, stack: PackedCodes
) -> torch.Tensor:
    """Each row of inputs times its own matrix of a stack.

    Args:
        hidden: [num_tokens, columns]
        tokens: int32 [n], the token that each row of inputs is; None: the rows of ``hidden`` as they are.
        starts: int32 [matrices + 1]; rows ``starts[i]`` to ``starts[i + 1]`` are multiplied by matrix ``i``.

    Returns:
        [n, rows of one matrix]
    """
    count = len(hidden) if tokens is None else len(tokens)
    output = hidden.new_empty((count, stack.rows))
    s = stack
    tape.call(
        _grouped_linear,
        hidden, tokens, starts, s.codes, s.scales, s.zeros, s.rows, s.bits, s.group_size, output,
    )  # fmt: skip
    return output


def look_up(matrix: PackedCodes, wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some rows: [n] int64 -> [n, columns] of ``dtype``"""
    output = torch.empty((wanted.shape[0], matrix.columns), dtype=dtype)
    m = matrix
    tape.call(_look_up, m.codes, m.scales, m.zeros, m.rows, m.bits, m.group_size, wanted, output)
    return output
