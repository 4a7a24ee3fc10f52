"""The reference attention backend in plain PyTorch, which the others are tested against; it runs on
any device."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    AttentionSetup,
    AttentionSpec,
)
from radixrt.attention.image_spans import ImageSpans
from radixrt.attention.kv_spec import KVSpec, to_kv_dtype
from radixrt.attention.metadata import AttentionMetadata
from radixrt.base.errors import ConfigError

QUERY_BLOCK = 128
"""Prefill queries attended at once: bounds the score matrix, and skips keys that no query of a
block sees.

On one CPU core, a prompt of 2,048 tokens (16 heads of 64) takes 118 ms with blocks of 128 or 256,
125 with 512 and 204 in one piece; with a soft cap 246, 347, 939 and 1,328 ms."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Equally many queries of each of several sequences, attended in one batched computation."""

    tokens: Tensor  # [batch, queries] rows of the step's flat batch
    locations: Tensor  # [batch, keys] cache locations; short rows repeat one of their own
    visible: Tensor | None  # [batch, 1, queries, keys] bool; None: every key


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive queries of one sequence and the keys they may see, as positions in the
    sequence."""

    sequence: int
    token: int
    """Row of the first query in the flat batch."""
    first_query: int
    queries: int
    first_key: int
    end_key: int


class TorchReferenceBackend(AttentionBackend):
    """Gathers each sequence's keys and values from its pages, then computes dense masked attention.

    Decoding sequences are padded to one another and computed together, those of similar length in
    one block; a prefill is computed alone, in blocks of queries. Locations and masks are the same
    for all layers with one sliding window, and are computed once per step. A layer keeps keys and
    values, of different widths perhaps, or one tensor whose first features are the values.

    A prompt of three tokens on page 1 of a cache with pages of four tokens; its first token sees
    itself alone:

    >>> spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=8**-0.5)
    >>> metadata = AttentionMetadata(
    ...     qo_indptr_cpu=torch.tensor([0, 3], dtype=torch.int32),
    ...     kv_indptr_cpu=torch.tensor([0, 1], dtype=torch.int32),
    ...     last_page_len_cpu=torch.tensor([3], dtype=torch.int32),
    ...     kv_indices=torch.tensor([1], dtype=torch.int32),
    ...     kv_locations=torch.tensor([4, 5, 6]),
    ...     page_size=4,
    ... )
    >>> kv_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    >>> query, key, value = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    >>> backend = TorchReferenceBackend()
    >>> backend.plan(metadata)
    >>> output = backend.attend(AttentionInputs(query, key, value, kv_cache, spec))
    >>> output.shape, torch.allclose(output[0], value[0].expand(2, 8))
    (torch.Size([3, 2, 8]), True)
    >>> torch.equal(kv_cache[0][1, :3], key)
    True
    """

    def __init__(self, setup: AttentionSetup | None = None) -> None:
        """
        Args:
            setup: of the worker; None: plain keys and values.

        Raises:
            ConfigError: a layer keeps tensors other than keys and values, or one for both.
        """
        for kept in setup.kv_specs if setup else ():
            if setup and kept.tensors and not any(_reads(spec, kept) for spec in setup.specs):
                raise ConfigError(
                    f"No attention backend reads a KV cache of {kept}; use --kv-cache-dtype auto."
                )
        self._metadata: AttentionMetadata | None = None
        self._blocks: dict[int | None, list[_Block]] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._blocks = {}

    def attend(self, step: AttentionInputs) -> Tensor:
        assert self._metadata is not None, "plan() comes before attend()"
        query, spec = step.query, step.spec
        # each [locations, heads, features]
        caches = [cache.view(-1, *cache.shape[2:]) for cache in step.kv_cache]
        width = caches[-1].shape[-1]
        if step.key is not None and step.value is not None:
            width = step.value.shape[-1]
            for cache, states in zip(caches, (step.key, step.value), strict=False):
                _write(cache, self._metadata.kv_locations, states)
        if spec.sliding_window not in self._blocks:
            groups = _group(_spans(self._metadata, spec.sliding_window))
            self._blocks[spec.sliding_window] = [
                _block(spans, self._metadata, spec.sliding_window) for spans in groups
            ]
        output = query.new_empty((*query.shape[:-1], width))
        for block in self._blocks[spec.sliding_window]:
            keys, *values = (
                _read(cache, block.locations.flatten(), query.dtype).unflatten(
                    0, block.locations.shape
                )
                for cache in caches
            )
            output[block.tokens] = _dense_attention(
                query[block.tokens],
                keys,
                values[0] if values else keys[..., :width],
                block.visible,
                spec,
                step.sinks,
            )
        if self._metadata.image_spans:
            ImageSpans(self._metadata).attend(step, output)
        return output


def _reads(spec: AttentionSpec, kept: KVSpec) -> bool:
    """Whether a KV cache is floating-point keys, and values with as many heads or none."""
    keys, *values = kept.tensors
    return (
        keys.shape == (spec.num_kv_heads, spec.head_dim)
        and len(values) <= 1
        and all(len(t.shape) == 2 and t.shape[0] == spec.num_kv_heads for t in values)
        and all(t.dtype.is_floating_point for t in kept.tensors)
    )


def _write(cache: Tensor, locations: Tensor, states: Tensor) -> None:
    """Write ``states`` [num_tokens, heads, features] to ``locations`` [num_tokens] of ``cache``
    [locations, heads, features]."""
    states = to_kv_dtype(states, cache.dtype)
    if cache.dtype.itemsize == 1:  # torch moves bytes about, and knows no fp8 there
        cache, states = cache.view(torch.uint8), states.view(torch.uint8)
    cache.index_copy_(0, locations, states)


def _read(cache: Tensor, locations: Tensor, dtype: torch.dtype) -> Tensor:
    """The content of ``locations`` [n] in ``dtype``: [n, heads, features]."""
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
    """Decodes (one query) whose key counts lie within a factor of two go together, prefills
    alone."""
    decodes: dict[int, list[_Span]] = {}
    groups = []
    for span in spans:
        if span.queries == 1:
            decodes.setdefault((span.end_key - span.first_key).bit_length(), []).append(span)
        else:
            groups.append([span])
    return [*decodes.values(), *groups]


def _block(spans: list[_Span], metadata: AttentionMetadata, window: int | None) -> _Block:
    """The cache slots of the spans' keys, and the keys that each query sees."""
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """
    Args:
        query: [batch, queries, num_heads, head_dim]
        key: [batch, keys, num_kv_heads, head_dim]
        value: [batch, keys, num_kv_heads, v_head_dim]
        visible: [batch, 1, queries, keys] bool
        sinks: [num_heads]

    Returns:
        [batch, queries, num_heads, v_head_dim]
    """
    num_queries, group = query.shape[1], spec.num_heads // spec.num_kv_heads
    # The heads that share a KV head become further queries of it: no key is copied.
    query = query.unflatten(2, (spec.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [batch, num_kv_heads, keys, head_dim]
    if visible is not None:
        visible = visible.repeat(1, 1, group, 1)
    dtype = value.dtype
    if value.device.type == "cpu":
        # torch's kernel for half precision takes 3 to 5 times as long for a single query, and no
        # less for many
        query, key, value = query.float(), key.float(), value.float()
    if spec.soft_cap is None and sinks is None:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=spec.scale
        )
    else:
        scores = (query @ key.transpose(-1, -2)).float() * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # one more key, without a value
            sink = sinks.float().view(spec.num_kv_heads, group).repeat_interleave(num_queries, 1)
            scores = torch.cat([scores, sink[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : key.shape[2]]
        output = weights.to(value.dtype) @ value
    return output.to(dtype).unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
