"""How does one step come apart into what single kernels compute? Decodes and prefills, shared pages and own ones."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.metadata import AttentionMetadata
from radixrt.device import Device


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of queries and the pages that each row sees: what FlashInfer plans for."""

    qo_indptr: torch.Tensor  # [rows + 1] int32, on the host, pinned; begins at 0
    kv_indptr: torch.Tensor  # [rows + 1] int32, on the host, pinned; begins at 0
    last_page_len: torch.Tensor  # [rows] int32, on the host, pinned
    kv_indices: torch.Tensor  # [total_pages] int32, on the device

    @property
    def num_rows(self) -> int:
        return len(self.last_page_len)

    def query_lengths(self) -> NDArray[np.int32]:
        """[rows]"""
        return np.diff(self.qo_indptr.numpy())


@dataclass(frozen=True, slots=True)
class StepTables:
    """A step's decodes, then its prefills; None: it has none of them.

    A kernel cuts the queries of a batch into tiles whose size follows from their mean number. One long prefill
    among many decodes would make each of those pay for a large tile, so each kind gets a plan of its own.
    """

    decodes: PageTable | None
    prefills: PageTable | None

    @property
    def num_decodes(self) -> int:
        return 0 if self.decodes is None else self.decodes.num_rows

    @staticmethod
    def of(metadata: AttentionMetadata, device: Device) -> "StepTables":
        """Rows of one query before the first longer one decode."""
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
