"""Writes a step's keys and values into the paged KV cache by FlashInfer's append kernel."""

from typing import Any

import torch
from torch import Tensor

from radixrt.attention.flashinfer_wrappers import SharedBuffers
from radixrt.attention.kv_spec import LayerKV, to_kv_dtype
from radixrt.attention.metadata import AttentionMetadata
from radixrt.device.flashinfer_library import UntracedFunctions


class Append:
    """Writes a step's K and V into the cache.

    The kernel finds a token's page in the page table of its sequence. A step's metadata holds the
    location of each token already, so the kernel gets the page table of one sequence that owns
    every page in order: a token's position in it is its location. That table never changes.
    Locations of padding are on the spare page.
    """

    def __init__(
        self, library: Any, shared: SharedBuffers, locations: Tensor | None = None
    ) -> None:
        """
        Args:
            locations: [rows] int32 on the device: where a graph looks for the locations of a step;
                None: anew for each.
        """
        self._functions = UntracedFunctions(library)
        self._shared = shared
        self._fixed_locations = locations
        self._locations = locations
        self._sequence: Tensor | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        if self._fixed_locations is None:
            self._locations = metadata.kv_locations.to(torch.int32)
        else:
            self._fixed_locations.copy_(metadata.kv_locations)
        assert self._locations is not None
        if self._sequence is None or len(self._sequence) != len(self._locations):
            self._sequence = torch.zeros_like(self._locations)  # all tokens are of the only one

    def run(self, key: Tensor | None, value: Tensor | None, kv_cache: LayerKV) -> None:
        """``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim]; None: an earlier layer
        has written them."""
        if key is None or value is None:
            return
        assert self._locations is not None, "plan() comes before attend()"
        table = self._shared.whole_cache(kv_cache[0].shape[0])
        self._functions.append_paged_kv_cache(
            to_kv_dtype(key, kv_cache[0].dtype),
            to_kv_dtype(value, kv_cache[1].dtype),
            self._sequence,
            self._locations,
            kv_cache,
            table.kv_indices,
            table.kv_indptr,
            table.last_page_len,
            kv_layout="NHD",
        )
