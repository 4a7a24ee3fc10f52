"""Rotary position embedding in place."""

import torch

from radixrt_kernels import native, tape

if native is not None:
    _rotate = native.rotate


def rotate_(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Rotate features ``i`` and ``i + rotary_dim / 2`` of each head by the ``i``-th angle of its token's position, in place.

    Args:
        positions: [num_tokens] int64
        query, key: [num_tokens, heads, head_dim] of one dtype, perhaps views of one projection; features from
            rotary_dim on stay as they are
        cos_sin: [context_length, rotary_dim] float32, cosines then sines

    Raises:
        ValueError: a position has no row in ``cos_sin``, or shapes do not fit.
    """
    tape.call(_rotate, positions, query, key, cos_sin)
