"""Attention in plain PyTorch: runs on any device, short enough to read, and what other backends are tested against."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.attention.backend import AttentionSpec, KVCache
from radixrt.attention.kv_dtype import to_kv_dtype
from radixrt.attention.metadata import AttentionMetadata

QUERY_BLOCK = 128
"""Prefill queries attended at once: bounds the score matrix, and skips keys that no query of a block sees.

On one CPU core, a prompt of 2,048 tokens (16 heads of 64) takes 118 ms with blocks of 128 or 256, 125 with 512 and 204
in one piece; with a soft cap 246, 347, 939 and 1,328 ms."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Equally many queries of each of several sequences, attended in one batched computation."""

    tokens: Tensor  # [batch, queries] rows of the step's flat batch
    locations: Tensor  # [batch, keys] cache locations; short rows repeat one of their own
    visible: Tensor | None  # [batch, 1, queries, keys] bool; None: every key


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive queries of one sequence and the keys they may see, as positions in the sequence."""

    sequence: int
    token: int
    """Row of the first query in the flat batch."""
    first_query: int
    queries: int
    first_key: int
    end_key: int


class TorchReferenceBackend:
    """Gathers each sequence's keys and values from its pages, then computes dense masked attention.

    Decoding sequences are padded to one another and computed together, those of similar length in one
    block; a prefill is computed alone, in blocks of queries. Which locations and masks that takes is the
    same for all layers with one sliding window, and is worked out once a step.
    """

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._blocks: dict[int | None, list[_Block]] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._blocks = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, spec: AttentionSpec
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert self._metadata is not None, "plan() comes before attend()"
        # each [locations, num_kv_heads, head_dim]
        keys, values = (cache.view(-1, *cache.shape[2:]) for cache in kv_cache)
        _write(keys, self._metadata.kv_locations, key)
        _write(values, self._metadata.kv_locations, value)
        if spec.sliding_window not in self._blocks:
            groups = _group(_spans(self._metadata, spec.sliding_window))
            self._blocks[spec.sliding_window] = [
                _block(spans, self._metadata, spec.sliding_window) for spans in groups
            ]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for block in self._blocks[spec.sliding_window]:
            shape = block.locations.shape
            output[block.tokens] = _dense_attention(
                query[block.tokens],
                _read(keys, block.locations.flatten(), query.dtype).unflatten(0, shape),
                _read(values, block.locations.flatten(), query.dtype).unflatten(0, shape),
                block.visible,
                spec,
            )
        return output


def _write(cache: Tensor, locations: Tensor, states: Tensor) -> None:
    """``states`` [num_tokens, num_kv_heads, head_dim] go to ``locations`` [num_tokens] of [locations, num_kv_heads, head_dim]."""
    states = to_kv_dtype(states, cache.dtype)
    if cache.dtype.itemsize == 1:  # torch moves bytes about, and knows no fp8 there
        cache, states = cache.view(torch.uint8), states.view(torch.uint8)
    cache.index_copy_(0, locations, states)


def _read(cache: Tensor, locations: Tensor, dtype: torch.dtype) -> Tensor:
    """What lies in ``locations`` [n], as ``dtype``: [n, num_kv_heads, head_dim]."""
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8).index_select(0, locations).view(cache.dtype).to(dtype)
    return cache.index_select(0, locations)


def _spans(metadata: AttentionMetadata, window: int | None) -> list[_Span]:
    """Cut each sequence's queries into blocks and find the keys of each."""
    spans = []
    starts = metadata.qo_indptr_cpu.tolist()
    for sequence, kv_length in enumerate(metadata.kv_lengths().tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        first_position = kv_length - (end - start)
        for token in range(start, end, QUERY_BLOCK):
            queries = min(QUERY_BLOCK, end - token)
            first_query = first_position + token - start
            first_key = 0 if window is None else max(0, first_query - window + 1)
            end_key = first_query + queries
            spans.append(_Span(sequence, token, first_query, queries, first_key, end_key))
    return spans


def _group(spans: list[_Span]) -> list[list[_Span]]:
    """Decodes (one query) whose key counts lie within a factor of two go together, prefills alone."""
    decodes: dict[int, list[_Span]] = {}
    groups = []
    for span in spans:
        if span.queries == 1:
            decodes.setdefault((span.end_key - span.first_key).bit_length(), []).append(span)
        else:
            groups.append([span])
    return [*decodes.values(), *groups]


def _block(spans: list[_Span], metadata: AttentionMetadata, window: int | None) -> _Block:
    """Where the spans' keys lie in the cache, and who sees which."""
    page_size, device = metadata.page_size, metadata.kv_indices.device
    first_pages = metadata.kv_indptr_cpu.tolist()
    rows = torch.tensor(
        [(s.token, s.first_query, s.first_key, s.end_key, first_pages[s.sequence]) for s in spans]
    )
    token, first_query, first_key, end_key, first_page = rows.unsqueeze(-1).unbind(1)  # [batch, 1]
    queries = torch.arange(spans[0].queries)
    key_positions = first_key + torch.arange(int((end_key - first_key).max()))  # [batch, keys]
    within = key_positions < end_key
    key_positions = torch.where(within, key_positions, first_key)

    distance = (first_query + queries)[:, :, None] - key_positions[:, None, :]
    visible = within[:, None, :] & (distance >= 0)  # [batch, queries, keys]
    if window is not None:
        visible &= distance < window

    pages = metadata.kv_indices[(first_page + key_positions // page_size).to(device)].long()
    return _Block(
        tokens=(token + queries).to(device),
        locations=pages * page_size + (key_positions % page_size).to(device),
        visible=None if visible.all() else visible[:, None].to(device),
    )


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """
    Args:
        query: [batch, queries, num_heads, head_dim]
        key, value: [batch, keys, num_kv_heads, head_dim]
        visible: [batch, 1, queries, keys] bool

    Returns:
        [batch, queries, num_heads, head_dim]
    """
    num_queries, group = query.shape[1], spec.num_heads // spec.num_kv_heads
    # The heads that share a KV head become further queries of it: no key is copied.
    query = query.unflatten(2, (spec.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [batch, num_kv_heads, keys, head_dim]
    if visible is not None:
        visible = visible.repeat(1, 1, group, 1)
    dtype = value.dtype
    if value.device.type == "cpu":
        # torch's kernel for half precision takes 3 to 5 times as long for a single query, and no less for many
        query, key, value = query.float(), key.float(), value.float()
    if spec.soft_cap is None:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=spec.scale
        )
    else:
        scores = (query @ key.transpose(-1, -2)).float() * spec.scale
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        output = scores.softmax(dim=-1).to(value.dtype) @ value
    return output.to(dtype).unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
