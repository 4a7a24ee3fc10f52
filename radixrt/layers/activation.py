"""Gated activations: the gate's half of a merged projection, activated, times the other half."""

import torch
import torch.nn.functional as F

from radixrt.errors import ConfigError


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]; gate first"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]; gate first"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]; gate first"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


_GATED = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
    "gelu_new": gelu_tanh_and_mul,
    "gelu": gelu_and_mul,
}


def gated_activation(name: str):
    """The function for a config's ``hidden_act``.

    Raises:
        ConfigError: the activation is not one that gated MLPs use here.
    """
    if name not in _GATED:
        raise ConfigError(
            f"The checkpoint's activation {name!r} is not supported; supported: {', '.join(_GATED)}."
        )
    return _GATED[name]
