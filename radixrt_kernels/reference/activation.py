"""Gated activations: half of a merged projection, activated, times the other half."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """Computed in float32 and rounded once. [num_tokens, 2 * size] -> [num_tokens, size]; gate first"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_ACTIVATIONS[name](gate) * up).to(gate_up.dtype)
