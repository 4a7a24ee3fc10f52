"""Splits the page table of a step into one table per kernel: decodes, prefills, shared pages, own
pages."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixrt.attention.metadata import AttentionMetadata, PrefixGroups
from radixrt.device.device import Device


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of queries and the pages that each row reads: the input of FlashInfer's plans."""

    qo_indptr: Tensor  # [rows + 1] int32, on the host, pinned; begins at 0
    kv_indptr: Tensor  # [rows + 1] int32, on the host, pinned; begins at 0
    last_page_len: Tensor  # [rows] int32, on the host, pinned
    kv_indices: Tensor  # [total_pages] int32, on the device

    @property
    def num_rows(self) -> int:
        return len(self.last_page_len)

    def query_lengths(self) -> NDArray[np.int32]:
        """[rows]"""
        return np.diff(self.qo_indptr.numpy())


@dataclass(frozen=True, slots=True)
class StepTables:
    """The page tables of a step's decodes and of its prefills; None: it has none.

    A kernel cuts the queries of a batch into tiles whose size follows from their mean number. One
    long prefill among many decodes would make each of those pay for a large tile, so each kind gets
    a plan of its own.
    """

    decodes: PageTable | None
    prefills: PageTable | None

    @property
    def num_decodes(self) -> int:
        return 0 if self.decodes is None else self.decodes.num_rows

    @staticmethod
    def from_metadata(metadata: AttentionMetadata, device: Device) -> "StepTables":
        """Cut ``metadata`` before the first row of several queries: the rows before it decode."""
        qo_indptr = metadata.qo_indptr_cpu.numpy()
        kv_indptr = metadata.kv_indptr_cpu.numpy()
        longer = np.flatnonzero(np.diff(qo_indptr) != 1)
        decodes = int(longer[0]) if len(longer) else len(qo_indptr) - 1
        pages = int(kv_indptr[decodes])
        decode_table = PageTable(
            metadata.qo_indptr_cpu[: decodes + 1],
            metadata.kv_indptr_cpu[: decodes + 1],
            metadata.last_page_len_cpu[:decodes],
            metadata.kv_indices[:pages],
        )
        if not len(longer):
            return StepTables(decode_table, None)
        queries, starts = device.pin(qo_indptr[decodes:] - decodes, kv_indptr[decodes:] - pages)
        prefill_table = PageTable(
            queries, starts, metadata.last_page_len_cpu[decodes:], metadata.kv_indices[pages:]
        )
        return StepTables(decode_table if decodes else None, prefill_table)


@dataclass(frozen=True, slots=True)
class CascadeTables:
    """The page tables of decoding rows for a cascade: the pages that groups share, and each row's
    own."""

    shared: PageTable  # rows are groups
    own: PageTable
    sharing: Tensor  # [rows] bool, on the device: the row's group shares something

    @staticmethod
    def for_groups(
        decodes: PageTable, groups: PrefixGroups, page_size: int, device: Device
    ) -> "CascadeTables":
        """
        Args:
            decodes: one query a row.
            groups: of these rows.
        """
        row_pages = groups.num_pages.repeat(groups.sizes())  # [rows]
        starts = decodes.kv_indptr.numpy()
        shared_at = _ranges(
            starts[groups.indptr[:-1].clip(max=len(row_pages) - 1)], groups.num_pages
        )
        own_at = _ranges(starts[:-1] + row_pages, np.diff(starts) - row_pages)
        shared_entries, own_entries, sharing = device.upload(shared_at, own_at, row_pages > 0)
        qo_indptr, shared_indptr, full, own_indptr = device.pin(
            groups.indptr,
            _indptr(groups.num_pages),
            np.full(len(groups.num_pages), page_size, np.int32),
            _indptr(np.diff(starts) - row_pages),
        )
        return CascadeTables(
            shared=PageTable(qo_indptr, shared_indptr, full, decodes.kv_indices[shared_entries]),
            own=PageTable(
                decodes.qo_indptr,
                own_indptr,
                decodes.last_page_len,
                decodes.kv_indices[own_entries],
            ),
            sharing=sharing,
        )


def _indptr(counts: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """``counts[i]`` consecutive numbers from ``starts[i]`` on, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
