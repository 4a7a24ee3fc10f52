"""Linear layers with 4- or 8-bit weights: decode the weights, round the activations, multiply."""

import dataclasses

import torch

from radixrt_kernels.groupwise import COLUMNS_A_STEP, PackedCodes

LONGEST_CHUNK = 128


def dequantize(matrix: PackedCodes) -> torch.Tensor:
    """The weights: float64 [rows, columns]."""
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
    """Number of columns with one activation scale: the largest power of two up to 128 that divides
    a group."""
    chunk = LONGEST_CHUNK
    while matrix.group_size < matrix.columns and matrix.group_size % chunk:
        chunk //= 2
    assert chunk >= COLUMNS_A_STEP
    return chunk


def round_activations(hidden: torch.Tensor, chunk: int) -> torch.Tensor:
    """Round each chunk to integers of at most 127 times a scale. Returns float64 [num_tokens,
    columns]."""
    parts = []
    for part in hidden.float().split(chunk, dim=1):
        reach = part.abs().amax(dim=1, keepdim=True).clamp(min=1e-36)
        inverse = torch.full_like(reach, 127) / reach  # torch rounds twice in number / tensor
        parts.append((part * inverse).round().double() * (reach / 127))
    return torch.cat(parts, dim=1)


def linear(
    hidden: torch.Tensor,
    matrix: PackedCodes,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[num_tokens, columns] -> [num_tokens, rows]"""
    output = round_activations(hidden, chunk_size(matrix)) @ dequantize(matrix).T
    return (output if bias is None else output + bias.double()).to(output_dtype or hidden.dtype)


def grouped_linear(
    hidden: torch.Tensor, tokens: torch.Tensor | None, starts: torch.Tensor, stack: PackedCodes
) -> torch.Tensor:
    """Apply :func:`linear` matrix by matrix. Returns [n, rows]."""
    inputs = hidden if tokens is None else hidden[tokens.long()]
    groups = inputs.split(starts.diff().tolist())
    return torch.cat([linear(own, matrix_of(stack, i)) for i, own in enumerate(groups)])


def matrix_of(stack: PackedCodes, index: int) -> PackedCodes:
    """One matrix of a stack."""
    parts = {name: getattr(stack, name)[index] for name in ("codes", "scales", "zeros")}
    return dataclasses.replace(stack, **parts)
