"""Linear layers with GGUF's blocks: decode the packed weights, round the activations, multiply."""

from collections.abc import Sequence

import torch

from radixrt_kernels.blockwise import PackedBlocks
from radixrt_kernels.linear import PANEL
from radixrt_kernels.reference.groupwise import round_activations

BLOCK, RECORD = 32, 256
Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4 = 2, 6, 8, 12, 13, 14, 39
BITS = {Q4_0: 4, Q5_0: 5, Q8_0: 8, Q4_K: 4, Q5_K: 5, Q6_K: 6, MXFP4: 4}
ZEROS = {Q4_0: 8, Q5_0: 16, Q8_0: 128, Q6_K: 32}
"""The code of the weight 0, where it is not 0."""
FLOATS_OF_4_BITS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def dequantize(matrix: PackedBlocks) -> torch.Tensor:
    """The weights: float32 [rows, columns]."""
    records = []
    rest = matrix.packed
    for first in range(0, matrix.columns, RECORD):
        blocks = min(RECORD, matrix.columns - first) // BLOCK
        scales, codes, rest = rest.tensor_split(_bounds(matrix.kind, blocks), dim=1)
        records.append(_record(matrix.kind, blocks, scales, codes))
    return torch.cat(records, dim=2).flatten(0, 1)[: matrix.rows].float()


def _bounds(kind: int, blocks: int) -> tuple[int, int]:
    """The ends of the scales and of the codes of a record, in bytes."""
    own = 20 * PANEL if kind in (Q4_K, Q5_K, Q6_K) else blocks * PANEL * (1 if kind == MXFP4 else 2)
    end = -(-own // 64) * 64
    return end, end + blocks * BITS[kind] * 4 * PANEL


def _record(kind: int, blocks: int, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Decode a record of each panel: float64 [panels, PANEL, columns]."""
    codes = _codes(codes.unflatten(1, (blocks, BITS[kind], PANEL, 4)))
    if kind == MXFP4:
        values = torch.tensor(FLOATS_OF_4_BITS).double()[codes.long()]
    else:
        values = codes.double() - ZEROS.get(kind, 0)
    scale, minimum = _scales(scales, kind, blocks)
    weights = values * scale.repeat_interleave(8 // scale.shape[2], dim=2).unsqueeze(-1)
    weights -= minimum.unsqueeze(2).unsqueeze(-1)
    return weights.permute(0, 3, 1, 2, 4).flatten(2)


def _codes(lines: torch.Tensor) -> torch.Tensor:
    """[panels, blocks, bits, PANEL, 4] -> [panels, blocks, 8 steps, PANEL, 4]"""
    bits = lines.shape[2]
    if bits == 8:
        return lines
    low = torch.stack((lines[:, :, :4] & 15, lines[:, :, :4] >> 4), dim=3).flatten(2, 3)
    if bits == 4:
        return low
    shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8).view(-1, 1, 1)
    upper = lines[:, :, 4:].unsqueeze(3) >> shifts & (1 << bits - 4) - 1
    return low | upper.flatten(2, 3) << 4


def _scales(scales: torch.Tensor, kind: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [panels, blocks, groups, PANEL] and minima [panels, blocks or 1, PANEL], float64."""
    nothing = torch.zeros(len(scales), 1, PANEL, dtype=torch.float64)
    if kind == MXFP4:
        exponents = scales[:, : blocks * PANEL].unflatten(1, (blocks, 1, PANEL))
        return torch.exp2(exponents.double() - 127), nothing
    if kind in (Q4_0, Q5_0, Q8_0):
        halves = scales[:, : blocks * 2 * PANEL].contiguous().view(torch.float16)
        return halves.double().unflatten(1, (blocks, 1, PANEL)), nothing
    scale = scales[:, : 2 * PANEL].contiguous().view(torch.float16).double().unsqueeze(1)
    if kind == Q6_K:
        parts = scales[:, 2 * PANEL : 18 * PANEL].view(torch.int8).unflatten(1, (16, PANEL))
        return (scale * parts).unflatten(1, (blocks, 2)), nothing
    minimum = scales[:, 2 * PANEL : 4 * PANEL].contiguous().view(torch.float16).double()
    parts = scales[:, 4 * PANEL :].unflatten(1, (blocks, 2, PANEL))
    return (scale * parts[:, :, 0]).unsqueeze(2), minimum.unsqueeze(1) * parts[:, :, 1]


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
