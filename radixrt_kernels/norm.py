"""RMSNorm in one pass, alone or with the residual addition before it."""

import torch

from radixrt_kernels import native, tape

if native is not None:
    _rms_norm = native.rms_norm


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """``hidden / rms(hidden) * weight``, the rms in float32.

    Args:
        hidden: [num_tokens, size], or [num_tokens, heads, size] to norm each head; perhaps a view of a projection
        weight: [size] of the same dtype
        unit_offset: multiply by ``1 + weight`` and round once at the end (Gemma); else the normed values are rounded
            before they are multiplied (Llama)

    Returns:
        a new tensor of hidden's shape
    """
    output = torch.empty(hidden.shape, dtype=hidden.dtype)
    tape.call(_rms_norm, hidden, None, weight, output, eps, unit_offset)
    return output


def add_rms_norm_(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """In place: ``residual`` becomes ``residual + hidden``, and ``hidden`` the norm of that. See :func:`rms_norm`."""
    tape.call(_rms_norm, hidden, residual, weight, hidden, eps, unit_offset)
