"""Gated activations in one pass over memory; torch takes two and rounds in between."""

import torch

from radixrt_kernels import native, tape

if native is not None:
    _gated_activation = native.gated_activation
    _ACTIVATIONS = {
        name: getattr(native.Activation, name) for name in ("silu", "gelu", "gelu_tanh")
    }


def gated_activation(
    gate_up: torch.Tensor, name: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The activation of the first half of the features times the second half.

    Args:
        gate_up: [num_tokens, 2 * size], gate first; rows may have gaps between them.
        name: ``silu``, ``gelu`` (exact) or ``gelu_tanh`` (approximated by tanh).
        out: [num_tokens, size]; default: a new one, which is returned.
    """
    if out is None:
        tokens, columns = gate_up.shape
        out = gate_up.new_empty((tokens, columns // 2))
    tape.call(_gated_activation, gate_up, out, _ACTIVATIONS[name])
    return out
