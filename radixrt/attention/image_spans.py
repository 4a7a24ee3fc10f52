"""Attention in both directions inside an image, among tokens that are otherwise causal (Gemma 3).

A step computes all positions of such an image at once, and these rows depend on the sequence alone:
which keys they read, and in how many rows at a time, are the same in every batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.attention.backend import AttentionInputs
from radixrt.attention.metadata import AttentionMetadata


class _Span(NamedTuple):
    """The rows of an image, and what they see."""

    rows: slice
    """Its rows of the flat batch."""
    locations: Tensor  # [keys] int64 of the cache
    visible: Tensor  # [queries, keys] bool


class ImageSpans:
    """The images of one step. A row sees what a causal one does, and the rest of its image. A sliding
    window bounds what is before it."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._spans: dict[int | None, list[_Span]] = {}

    def attend(self, step: AttentionInputs, output: Tensor) -> None:
        """Overwrite the rows of images in ``output`` [num_tokens, num_heads, head_dim]; the keys
        and values of the step are in the cache."""
        spec = step.spec
        if not spec.whole_images:
            return
        if spec.sliding_window not in self._spans:
            spans = self._metadata.image_spans
            self._spans[spec.sliding_window] = [
                self._span(row, count, spec.sliding_window) for row, count in spans
            ]
        for span in self._spans[spec.sliding_window]:
            # each [1, heads, rows, head_dim]
            query = step.query[span.rows].transpose(0, 1)[None]
            key, value = (
                cache.view(-1, *cache.shape[2:])[span.locations].transpose(0, 1)[None]
                for cache in step.kv_cache
            )
            attended = F.scaled_dot_product_attention(
                query.float(),
                key.float(),
                value.float(),
                attn_mask=span.visible,
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            output[span.rows] = attended[0].transpose(0, 1).to(output.dtype)

    def _span(self, row: int, count: int, window: int | None) -> _Span:
        metadata = self._metadata
        ends = metadata.qo_indptr_cpu[1:]
        sequence = int(torch.searchsorted(ends, row, right=True))
        start = int(metadata.kv_lengths()[sequence]) - (int(ends[sequence]) - row)
        end = start + count
        first = 0 if window is None else max(0, start - window + 1)
        keys, size = torch.arange(first, end), metadata.page_size
        pages = metadata.kv_indices[int(metadata.kv_indptr_cpu[sequence]) :][keys // size]
        queries = torch.arange(start, end)[:, None]
        visible = (keys <= queries) | (keys >= start)
        if window is not None:
            visible &= keys > queries - window
        return _Span(slice(row, row + count), pages.long() * size + keys % size, visible)
