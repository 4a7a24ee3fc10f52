"""Linear layers with GGUF's blocks: decode the packed weights, round the activations, multiply."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from radixrt_kernels.blockwise import PackedBlocks
from radixrt_kernels.linear import PANEL
from radixrt_kernels.reference.groupwise import round_activations

BLOCK, RECORD = 32, 256


class Form(NamedTuple):
    """The packed form of a kind; see ``csrc/block_forms.hpp``."""

    bits: int
    head_bytes: int
    part_bytes: int
    """Bytes of the scales of a record, and of 32 columns in it, for a row."""
    values: tuple[float, ...] = ()
    """The weight of each code, without scale; (): the code itself."""


def _linear(bits: int, zero: int) -> tuple[float, ...]:
    return tuple(float(code - zero) for code in range(1 << bits))


def _signed(*values: float) -> tuple[float, ...]:
    return (*values, *(-value for value in values))


_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_EIGHTHS = _signed(1, 25 / 8, 43 / 8, 0)
_QUARTERS = _signed(1, 3, 5, 7, 9, 11, 13, 15.5)

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 10, 11, 12, 13, 14
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, MXFP4 = 16, 17, 18, 20, 21, 22, 23, 39
FORMS = {
    Q4_0: Form(4, 0, 2, _linear(4, 8)),
    Q4_1: Form(4, 0, 4),
    Q5_0: Form(5, 0, 2, _linear(5, 16)),
    Q5_1: Form(5, 0, 4),
    Q8_0: Form(8, 0, 2, _linear(8, 128)),
    Q2_K: Form(2, 4, 2),
    Q3_K: Form(3, 2, 2, _linear(3, 4)),
    Q4_K: Form(4, 4, 2),
    Q5_K: Form(5, 4, 2),
    Q6_K: Form(6, 2, 2, _linear(6, 32)),
    IQ2_XXS: Form(3, 2, 1, _EIGHTHS),
    IQ2_XS: Form(3, 2, 1, _EIGHTHS),
    IQ2_S: Form(3, 2, 1, _EIGHTHS),
    IQ3_XXS: Form(4, 2, 1, _QUARTERS),
    IQ3_S: Form(4, 2, 1, tuple(float(odd) for odd in range(-15, 16, 2))),
    IQ4_NL: Form(4, 0, 2, _UNEVEN),
    IQ4_XS: Form(4, 2, 1, _UNEVEN),
    MXFP4: Form(4, 0, 1, _signed(0, 0.5, 1, 1.5, 2, 3, 4, 6)),
}


def dequantize(matrix: PackedBlocks) -> torch.Tensor:
    """The weights: float32 [rows, columns]."""
    records = []
    form, rest = FORMS[matrix.kind], matrix.packed
    for first in range(0, matrix.columns, RECORD):
        blocks = min(RECORD, matrix.columns - first) // BLOCK
        end = -(-PANEL * (form.head_bytes + blocks * form.part_bytes) // 64) * 64
        ends = (end, end + blocks * form.bits * 4 * PANEL)
        scales, codes, rest = rest.tensor_split(ends, dim=1)
        records.append(_record(matrix.kind, blocks, scales, codes))
    return torch.cat(records, dim=2).flatten(0, 1)[: matrix.rows].float()


def _record(kind: int, blocks: int, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Decode a record of each panel: float64 [panels, PANEL, columns]."""
    form = FORMS[kind]
    codes = _codes(codes.unflatten(1, (blocks, form.bits, PANEL, 4)))
    table = torch.tensor(form.values or range(1 << form.bits), dtype=torch.float64)
    head = scales[:, : PANEL * form.head_bytes]
    parts = scales[:, PANEL * form.head_bytes :][:, : blocks * PANEL * form.part_bytes]
    scale, minimum = _scales(kind, head, parts.unflatten(1, (blocks, -1)))
    groups = scale.shape[2]
    weights = table[codes.long()].unflatten(2, (groups, 8 // groups))
    weights = weights * scale[:, :, :, None, :, None] - minimum[:, :, :, None, :, None]
    return weights.permute(0, 4, 1, 2, 3, 5).flatten(2)


def _codes(lines: torch.Tensor) -> torch.Tensor:
    """[panels, blocks, bits, PANEL, 4] -> [panels, blocks, 8 steps, PANEL, 4]"""
    bits = lines.shape[2]
    if bits == 8:
        return lines
    if bits == 2:
        return _of_steps(lines, 2)
    if bits == 3:
        six = torch.stack((lines & 7, lines >> 3 & 7), dim=3).flatten(2, 3)
        last = lines[:, :, :2] >> 6 | _of_steps(lines[:, :, 2:], 1)[:, :, 6:] << 2
        return torch.cat((six, last), dim=2)
    low = torch.stack((lines[:, :, :4] & 15, lines[:, :, :4] >> 4), dim=3).flatten(2, 3)
    return low if bits == 4 else low | _of_steps(lines[:, :, 4:], bits - 4) << 4


def _of_steps(lines: torch.Tensor, bits: int) -> torch.Tensor:
    """Lines with some bits of several steps in each byte, the first in the lowest."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1, 1)
    return (lines.unsqueeze(3) >> shifts & (1 << bits) - 1).flatten(2, 3)


def _scales(
    kind: int, head: torch.Tensor, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, float64 [panels, blocks or 1, groups, PANEL].

    Args:
        head: uint8 [panels, bytes], of the record
        parts: uint8 [panels, blocks, bytes], of 32 columns each
    """
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    if kind == MXFP4:
        return torch.exp2(parts.double() - 127).unsqueeze(2), nothing
    if not len(head[0]):
        scale, *minimum = _halves(parts).chunk(FORMS[kind].part_bytes // 2, dim=2)
        return scale, -minimum[0] if minimum else nothing
    scale, *minimum = _halves(head.unsqueeze(1)).split(1, dim=2)
    if kind in (Q6_K, Q3_K, IQ4_XS):
        return scale * parts.view(torch.int8).unflatten(2, (-1, PANEL)), nothing
    parts = parts.unflatten(2, (-1, PANEL))
    if kind in (Q4_K, Q5_K):
        return scale * parts[:, :, :1], minimum[0] * parts[:, :, 1:]
    if kind == Q2_K:
        return scale * (parts & 15), minimum[0] * (parts >> 4)
    if kind in (IQ2_XS, IQ2_S):
        parts = torch.cat([parts & 15, parts >> 4], dim=2) * 2 + 1
    return scale * parts, nothing


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """[panels, blocks, bytes] -> float64 [panels, blocks, numbers a row, PANEL]"""
    return numbers.contiguous().view(torch.float16).double().unflatten(2, (-1, PANEL))


def linear(
    hidden: torch.Tensor,
    matrices: Sequence[PackedBlocks],
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[num_tokens, columns] -> [num_tokens, rows of all matrices]"""
    rounded = round_activations(hidden, BLOCK)
    output = torch.cat([rounded @ dequantize(m).double().T for m in matrices], dim=1)
    return (output if bias is None else output + bias.double()).to(output_dtype or hidden.dtype)
