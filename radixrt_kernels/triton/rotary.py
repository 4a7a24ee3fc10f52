"""Rotary position embedding (Su et al., 2021) of queries and keys, in place, from a table of
cosines and sines."""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of, rows_of, warps_for


@triton.jit
def _rotate_heads(
    start, heads, head_stride, cos, sin, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Rotate the heads of one token. A pair is the features ``i`` and ``i + half``."""
    head = tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    first_at = start + head[:, None] * head_stride + pair[None, :]
    second_segment_start = first_at + half
    first = tl.load(first_at, mask=inside, other=0.0)
    second = tl.load(second_segment_start, mask=inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    tl.store(first_at, (x * cos[None, :] - y * sin[None, :]).to(first.dtype), mask=inside)
    tl.store(
        second_segment_start, (y * cos[None, :] + x * sin[None, :]).to(first.dtype), mask=inside
    )


@triton.jit
def _rotate_kernel(
    positions, query, key, cos_sin,
    query_heads, key_heads, query_row, query_head, key_row, key_head, half,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * half + pair
    cos = tl.load(angles, mask=pair < half, other=0.0)
    sin = tl.load(angles + half, mask=pair < half, other=0.0)
    _rotate_heads(
        query + token * query_row, query_heads, query_head, cos, sin, half, QUERY_HEADS, HALF
    )
    _rotate_heads(key + token * key_row, key_heads, key_head, cos, sin, half, KEY_HEADS, HALF)


def rotate(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``rotary_dim`` features of each head in place. The others are not changed.

    Args:
        positions: [num_tokens] int32 or int64
        query, key: [num_tokens, heads, head_dim], may be views of one merged projection
        cos_sin: [context_length, rotary_dim] float32, cosines then sines, contiguous

    Returns:
        (query, key)
    """
    tokens, query_heads, query_row, query_head = rows_of(query)
    _, key_heads, key_row, key_head = rows_of(key)
    half = cos_sin.shape[1] // 2
    if tokens:
        _rotate_kernel[(tokens,)](
            positions, query, key, cos_sin,
            query_heads, key_heads, query_row, query_head, key_row, key_head, half,
            QUERY_HEADS=block_of(query_heads), KEY_HEADS=block_of(key_heads), HALF=block_of(half),
            num_warps=warps_for(query_heads * half),
        )  # fmt: skip
    return query, key
