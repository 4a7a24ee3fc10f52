"""How do a step's keys and values get into the paged cache? FlashInfer's append kernel, with a table that never changes."""

from typing import Any

import torch

from radixrt.attention.kv_dtype import to_kv_dtype
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.setup import AttentionSetup


class Append:
    """Writes a step's K and V into the cache.

    The kernel finds a token's page by the page table of its sequence. A step's metadata says already which slot of the
    cache each token gets, so the kernel is given one sequence that owns every page in order, in which
    a token's position is its slot. That table never changes, and padding needs no care: its slots are on the spare page.
    """

    def __init__(
        self, library: Any, setup: AttentionSetup, slots: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            slots: [rows] int32 on the device: where to keep the slots of a step; None: anew for each.
        """
        self._library = library
        self._setup = setup
        self._slots = slots
        self._fixed = slots is not None
        self._table: _WholeCache | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        if self._fixed:
            assert self._slots is not None
            self._slots.copy_(metadata.kv_slots)
        else:
            self._slots = metadata.kv_slots.to(torch.int32)

    def run(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> None:
        """``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim]; for the caches see ``AttentionBackend``."""
        assert self._slots is not None, "plan() comes before attend()"
        if self._table is None or len(self._table.kv_indices) < len(key_cache):
            self._table = _WholeCache(len(key_cache), self._setup.page_size, key.device)
        table = self._table
        self._library.append_paged_kv_cache(
            to_kv_dtype(key, key_cache.dtype),
            to_kv_dtype(value, value_cache.dtype),
            torch.zeros_like(self._slots),
            self._slots,
            (key_cache, value_cache),
            table.kv_indices,
            table.kv_indptr,
            table.last_page_len,
            kv_layout="NHD",
        )


class _WholeCache:
    """The page table of one sequence that owns all pages, in their order."""

    def __init__(self, num_pages: int, page_size: int, place: torch.device) -> None:
        self.kv_indices = torch.arange(num_pages, dtype=torch.int32, device=place)
        self.kv_indptr = torch.arange(2, dtype=torch.int32, device=place) * num_pages
        self.last_page_len = torch.full((1,), page_size, dtype=torch.int32, device=place)
