"""Gated activations: the activated first half of a merged projection times the second half."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """[num_tokens, 2 * size], gate first -> [num_tokens, size]. Computed in float32 and rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_ACTIVATIONS[name](gate) * up).to(gate_up.dtype)
