"""Causal attention over a paged KV cache, one sequence at a time."""

import torch

from radixrt_kernels.attention import SCALE_BYTES


def decoded(cache: torch.Tensor, *, rotated: bool) -> torch.Tensor:
    """The heads of an int8 cache.

    Args:
        cache: [..., head_dim + SCALE_BYTES] int8
        rotated: they are keys.

    Returns:
        [..., head_dim] float64
    """
    codes, scales = cache.split([cache.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    heads = codes.double() * scales.contiguous().view(torch.bfloat16).double()
    if not rotated:
        return heads
    block = codes.shape[-1] & -codes.shape[-1]
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < block:
        hadamard = torch.cat(
            (torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))
        )
    return (heads.unflatten(-1, (-1, block)) @ hadamard / block).flatten(-2)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    last_page_len: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention; the new keys and values are already in the cache.

    The arguments are those of :class:`radixrt_kernels.attention.AttentionPlan`.

    Returns:
        [num_tokens, num_heads, head_dim] in float64 for every input dtype
    """
    outputs = []
    for i, last in enumerate(last_page_len.tolist()):
        pages = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        length = (len(pages) - 1) * key_cache.shape[1] + last
        keys = key_cache[pages].flatten(0, 1)[:length].double()  # [keys, num_kv_heads, head_dim]
        values = value_cache[pages].flatten(0, 1)[:length].double()
        queries = query[int(qo_indptr[i]) : int(qo_indptr[i + 1])].double()
        outputs.append(_attention(queries, keys, values, scale, sliding_window, soft_cap, sinks))
    return torch.cat(outputs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence; the queries are the last positions of the keys."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(len(key) - len(query), len(key))
    distance = positions[:, None] - torch.arange(len(key))
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)
