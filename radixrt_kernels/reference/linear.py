"""Linear layers with packed weights: unpack, then multiply."""

import torch


def unpack(weights: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[panels, steps, 16] or [panels, steps, 16, 2] -> [rows, columns]"""
    if weights.dim() == 3:
        weights = weights.unsqueeze(-1)
    return weights.transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :columns]


def linear(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[num_tokens, columns] -> [num_tokens, rows]. Summed in float64 and rounded once."""
    output = hidden.double() @ unpack(weights, rows, hidden.shape[1]).double().T
    return (output if bias is None else output + bias.double()).to(output_dtype or hidden.dtype)


def grouped_linear(
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    starts: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """Apply :func:`linear` matrix by matrix. Returns [n, rows]."""
    inputs = hidden if tokens is None else hidden[tokens.long()]
    groups = inputs.split(starts.diff().tolist())
    return torch.cat(
        [linear(own, matrix, rows) for own, matrix in zip(groups, weights, strict=True)]
    )
