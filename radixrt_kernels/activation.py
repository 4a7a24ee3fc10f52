"""Gated activations in one pass over memory; torch needs two passes and rounds between them. Also
gates by a sigmoid, and the soft cap of logits."""

import torch

from radixrt_kernels import native, trace

if native is not None:
    _gated_activation = native.gated_activation
    _sigmoid_gate = native.sigmoid_gate
    _soft_cap = native.soft_cap
    _ACTIVATIONS = dict(native.Activation.__members__)


def gated_activation(
    gate_up: torch.Tensor, name: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``activation(gate) * up``; of ``clamped_swiglu`` ``gate * sigmoid(1.702 gate) * (up +
    1)``, both at most 7.

    Args:
        gate_up: [num_tokens, 2 * size], float32, bfloat16 or float16: the gate, then up. Rows may
            have gaps between them.
        name: ``silu``, ``gelu`` (exact), ``gelu_tanh`` (approximated by tanh) or ``clamped_swiglu``
            (gpt-oss; up is at least -7).
        out: [num_tokens, size] of the same dtype, or None for a new tensor.

    Returns:
        ``out``: [num_tokens, size]

    Raises:
        KeyError: unknown name.
        ValueError: the shapes do not fit.

    Example:
        >>> import torch
        >>> gated_activation(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "silu")
        tensor([[2.1932, 7.0464]])
    """
    if out is None:
        tokens, columns = gate_up.shape
        out = gate_up.new_empty((tokens, columns // 2))
    trace.call(_gated_activation, gate_up, out, _ACTIVATIONS[name])
    return out


def sigmoid_gate(gate: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``values * sigmoid(gate)``, or the sigmoid alone. A number's result does not depend
    on its place in memory.

    Args:
        gate: [num_tokens, heads, size], or [num_tokens, heads, 1] for all values of a head;
            float32, bfloat16 or float16. Heads may have gaps between them.
        values: [num_tokens, heads, size] of the same dtype

    Returns:
        a new tensor like the values, or like the gate

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> import torch
        >>> sigmoid_gate(torch.tensor([[[0.0]]]), torch.tensor([[[3.0, 4.0]]]))
        tensor([[[1.5000, 2.0000]]])
    """
    out = torch.empty((gate if values is None else values).shape, dtype=gate.dtype)
    trace.call(_sigmoid_gate, values, gate, out)
    return out


def soft_cap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replace each logit by ``cap * tanh(logit / cap)``, in place. A logit's result does not depend
    on its place in memory.

    Args:
        logits: float32 [rows, vocab]. Rows may have gaps between them.
        cap: positive

    Raises:
        ValueError: the shape, dtype or cap does not fit.

    Example:
        >>> import torch
        >>> soft_cap_(torch.tensor([[-100.0, 0.0, 1.0]]), 2.0)
        tensor([[-2.0000,  0.0000,  0.9242]])
    """
    trace.call(_soft_cap, logits, cap)
    return logits
