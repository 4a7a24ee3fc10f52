"""Linear layers of 4- or 8-bit codes: decode, round the activations, multiply."""

import dataclasses

import torch

from radixrt_kernels.groupwise import COLUMNS_A_STEP, PackedCodes

LONGEST_CHUNK = 128


def dequantize(matrix: PackedCodes) -> torch.Tensor:
    """float64 [rows, columns]"""
    codes = matrix.codes
    if matrix.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2)
    codes = codes.transpose(1, 2).flatten(2).flatten(0, 1)[: matrix.rows, : matrix.columns]
    scales, zeros = (
        of_groups.transpose(1, 2)
        .flatten(0, 1)[: matrix.rows]
        .double()
        .repeat_interleave(matrix.group_size, dim=1)[:, : matrix.columns]
        for of_groups in (matrix.scales, matrix.zeros)
    )
    return (codes.double() - zeros) * scales


def chunk_size(matrix: PackedCodes) -> int:
    """Columns that share an activation scale: as many as 128 that divide a group."""
    chunk = LONGEST_CHUNK
    while matrix.group_size < matrix.columns and matrix.group_size % chunk:
        chunk //= 2
    assert chunk >= COLUMNS_A_STEP
    return chunk


def round_activations(hidden: torch.Tensor, chunk: int) -> torch.Tensor:
    """float64 [num_tokens, columns]: each chunk's values as whole numbers of at most 127 times a scale"""
    parts = []
    for part in hidden.float().split(chunk, dim=1):
        reach = part.abs().amax(dim=1, keepdim=True).clamp(min=1e-36)
        inverse = (
            torch.full_like(reach, 127) / reach
        )  # torch divides a number by a tensor in two roundings
        parts.append((part * inverse).round().double() * (reach / 127))
    return torch.cat(parts, dim=1)


def linear(
    hidden: torch.Tensor, matrix: PackedCodes, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_tokens, columns] -> [num_tokens, rows]"""
    output = round_activations(hidden, chunk_size(matrix)) @ dequantize(matrix).T
    return (output if bias is None else output + bias.double()).to(hidden.dtype)


def grouped_linear(
    hidden: torch.Tensor, tokens: torch.Tensor | None, starts: torch.Tensor, stack: PackedCodes
) -> torch.Tensor:
    """Matrix by matrix: [n, rows]"""
    inputs = hidden if tokens is None else hidden[tokens.long()]
    groups = inputs.split(starts.diff().tolist())
    return torch.cat([linear(own, matrix_of(stack, i)) for i, own in enumerate(groups)])


def matrix_of(stack: PackedCodes, index: int) -> PackedCodes:
    """One of a stack's matrices."""
    parts = {name: getattr(stack, name)[index] for name in ("codes", "scales", "zeros")}
    return dataclasses.replace(stack, **parts)
