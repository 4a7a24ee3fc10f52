"""Gated activations in one pass over memory; torch takes two and rounds in between."""

import torch

from radixrt_kernels import native, tape

if native is not None:
    _gated_activation = native.gated_activation
    _silu, _gelu, _gelu_tanh = (
        native.Activation.silu,
        native.Activation.gelu,
        native.Activation.gelu_tanh,
    )


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]; gate first. Rows may have gaps between them."""
    return _gated(gate_up, out, _silu)


def gelu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As :func:`silu_and_mul`, with the exact GELU."""
    return _gated(gate_up, out, _gelu)


def gelu_tanh_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As :func:`silu_and_mul`, with GELU approximated by tanh."""
    return _gated(gate_up, out, _gelu_tanh)


def _gated(gate_up: torch.Tensor, out: torch.Tensor | None, activation: object) -> torch.Tensor:
    if out is None:
        tokens, columns = gate_up.shape
        out = gate_up.new_empty((tokens, columns // 2))
    tape.call(_gated_activation, gate_up, out, activation)
    return out
