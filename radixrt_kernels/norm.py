"""RMSNorm in one pass, alone or after the residual addition."""

import torch

from radixrt_kernels import native, trace

if native is not None:
    _rms_norm = native.rms_norm


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Compute ``hidden / rms(hidden) * weight`` over the last dimension, in float32.

    Args:
        hidden: [num_tokens, size], or [num_tokens, heads, size] to normalize each head; float32,
            bfloat16 or float16. It may be a view of a projection.
        weight: [size] of the same dtype
        eps: added to the mean square
        unit_offset: True: multiply by ``1 + weight`` and round once at the end (Gemma); False:
            round the normalized values before the multiplication (Llama)

    Returns:
        a new tensor of hidden's shape and dtype

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    output = torch.empty(hidden.shape, dtype=hidden.dtype)
    trace.call(_rms_norm, hidden, None, weight, output, eps, unit_offset)
    return output


def add_rms_norm_(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """Set ``residual`` to ``residual + hidden`` and ``hidden`` to its norm, both in place. See
    :func:`rms_norm`."""
    trace.call(_rms_norm, hidden, residual, weight, hidden, eps, unit_offset)
