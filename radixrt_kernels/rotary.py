"""Applies rotary position embedding in place."""

import torch

from radixrt_kernels import native, trace

if native is not None:
    _rotate = native.rotate


def rotate_(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Rotate features ``i`` and ``i + rotary_dim / 2`` of each head by the ``i``-th angle of the
    token's position, in place.

    Args:
        positions: [num_tokens] int64
        query, key: [num_tokens, heads, head_dim] of one dtype (float32, bfloat16 or float16); they
            may be views of one projection. Features from ``rotary_dim`` on are not changed.
        cos_sin: [context_length, rotary_dim] float32, cosines then sines
        interleaved: rotate features ``2 * i`` and ``2 * i + 1``

    Raises:
        ValueError: a position has no row in ``cos_sin``, or the shapes do not fit.

    Example, a rotation by 0 and by 90 degrees:
        >>> import torch
        >>> cos_sin = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # positions 0 and 1: cosine, sine
        >>> query = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
        >>> rotate_(torch.tensor([0, 1]), query, query.clone(), cos_sin)
        >>> query.tolist()
        [[[1.0, 2.0]], [[-2.0, 1.0]]]
    """
    trace.call(_rotate, positions, query, key, cos_sin, interleaved)
