"""Gated activations: the activated first half of a merged projection times the second half."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": lambda gate, up: (
        gate.clamp(max=7.0) * torch.sigmoid(1.702 * gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1)
    ),
}


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """[num_tokens, 2 * size], gate first -> [num_tokens, size]. Computed in float32 and rounded
    once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _ACTIVATIONS[name](gate, up).to(gate_up.dtype)
