"""Writing a step's new keys and values into the pages of the KV cache."""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of, rows_of


@triton.jit
def _append_row(
    source, target, heads, head_stride, head_dim, HEADS: tl.constexpr, DIM: tl.constexpr
):
    head, feature = tl.arange(0, HEADS), tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (feature < head_dim)[None, :]
    numbers = tl.load(source + head[:, None] * head_stride + feature[None, :], mask=inside)
    target_at = target + head[:, None] * head_dim + feature[None, :]
    tl.store(target_at, numbers.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _append_kernel(
    key, value, key_cache, value_cache, slots,
    heads, key_row, key_head, value_row, value_head, head_dim,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        start = slot * heads * head_dim
        _append_row(key + token * key_row, key_cache + start, heads, key_head, head_dim, HEADS, DIM)
        _append_row(
            value + token * value_row, value_cache + start, heads, value_head, head_dim, HEADS, DIM
        )


def append_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_slots: torch.Tensor,
) -> None:
    """Write token ``i`` to slot ``kv_slots[i]``, rounded to the cache's dtype (float8_e4m3fn too).

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], perhaps views into one merged projection
        key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim], contiguous
        kv_slots: [num_tokens] int32 or int64, page * page_size + offset; a negative one is skipped, which
            is what padding of a captured graph wants
    """
    tokens, heads, key_row, key_head = rows_of(key)
    _, _, value_row, value_head = rows_of(value)
    head_dim = key.shape[-1]
    if tokens:
        _append_kernel[(tokens,)](
            key, value, key_cache, value_cache, kv_slots,
            heads, key_row, key_head, value_row, value_head, head_dim,
            HEADS=block_of(heads), DIM=block_of(head_dim), num_warps=2,
        )  # fmt: skip
