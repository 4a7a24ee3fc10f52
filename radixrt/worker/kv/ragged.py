"""Computes the positions, pages and KV slots of a step's flat batch on the host.

Rows are sequences: decodes with one token each, then jumps and prefill chunks with several. See
:class:`radixrt.attention.metadata.AttentionMetadata` for the layout that these numbers describe.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.metadata import AttentionMetadata, PrefixGroups
from radixrt.device.device import Device


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """One step's flat batch. Pages and locations are those of the KV cache."""

    page_size: int
    positions: NDArray[np.int64]  # [num_tokens] of each token in its sequence
    qo_indptr: NDArray[np.int32]  # [rows + 1]
    kv_indptr: NDArray[np.int32]  # [rows + 1], counts pages
    last_page_len: NDArray[np.int32]  # [rows]
    kv_indices: NDArray[np.int32]  # [total_pages]
    kv_locations: NDArray[
        np.int64
    ]  # [num_tokens] page * page_size + offset, where each token's K and V go

    @staticmethod
    def for_slots(
        block_tables: NDArray[np.int32],
        page_size: int,
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> "RaggedStep":
        """The flat batch of a step.

        Slot 1 decodes position 2, and slot 0 computes three tokens from position 4 on:

        >>> tables = np.array([[7, 3], [5, 0]], dtype=np.int32)
        >>> step = RaggedStep.for_slots(tables, 4, np.array([1, 0]), lengths=np.array([1, 3]), starts=np.array([2, 4]))
        >>> step.positions.tolist(), step.kv_locations.tolist()
        ([2, 4, 5, 6], [22, 12, 13, 14])
        >>> step.qo_indptr.tolist(), step.kv_indptr.tolist(), step.kv_indices.tolist(), step.last_page_len.tolist()
        ([0, 1, 4], [0, 1, 3], [5, 7, 3], [3, 3])

        Args:
            block_tables: [max_slots, max_pages] page ids of all slots.
            page_size: tokens in a page.
            slots: [rows] slot of each row's sequence.
            lengths: [rows] tokens that the step computes of each.
            starts: [rows] position of the first of them.
        """
        ends = starts + lengths
        qo_indptr = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], lengths)
        pages = -(-ends // page_size)
        kv_indptr = np.concatenate(([0], np.cumsum(pages)))
        tables = block_tables.reshape(-1)
        first_entries = slots * block_tables.shape[1]  # of each slot's table
        entries = np.arange(kv_indptr[-1]) + np.repeat(first_entries - kv_indptr[:-1], pages)
        token_pages = tables[np.repeat(first_entries, lengths) + positions // page_size]
        return RaggedStep(
            page_size=page_size,
            positions=positions,
            qo_indptr=qo_indptr.astype(np.int32),
            kv_indptr=kv_indptr.astype(np.int32),
            last_page_len=(ends - (pages - 1) * page_size).astype(np.int32),
            kv_indices=tables[entries],
            kv_locations=token_pages.astype(np.int64) * page_size + positions % page_size,
        )

    def padded(self, rows: int, spare_page: int) -> "RaggedStep":
        """This pure decode step with padding up to ``rows`` rows: each is one token on the spare
        page, which belongs to no sequence."""
        more = rows - len(self.last_page_len)
        tokens, pages = self.qo_indptr[-1], self.kv_indptr[-1]
        counts = np.arange(1, more + 1, dtype=np.int32)
        return RaggedStep(
            page_size=self.page_size,
            positions=np.concatenate((self.positions, np.zeros(more, np.int64))),
            qo_indptr=np.concatenate((self.qo_indptr, tokens + counts)),
            kv_indptr=np.concatenate((self.kv_indptr, pages + counts)),
            last_page_len=np.concatenate((self.last_page_len, np.ones(more, np.int32))),
            kv_indices=np.concatenate((self.kv_indices, np.full(more, spare_page, np.int32))),
            kv_locations=np.concatenate(
                (self.kv_locations, np.full(more, spare_page * self.page_size))
            ),
        )

    def metadata(
        self,
        kv_indices: torch.Tensor,
        kv_locations: torch.Tensor,
        device: Device,
        groups: PrefixGroups | None = None,
    ) -> AttentionMetadata:
        """The step as attention backends take it.

        Args:
            kv_indices, kv_locations: the arrays of these names on the device.
            groups: of the first rows; the others share nothing.
        """
        if groups is not None:
            alone = len(self.last_page_len) - int(groups.indptr[-1])
            groups = groups.then_alone(alone) if groups.share else None
        qo_indptr, kv_indptr, last_page_len = device.pin(
            self.qo_indptr, self.kv_indptr, self.last_page_len
        )
        return AttentionMetadata(
            qo_indptr_cpu=qo_indptr,
            kv_indptr_cpu=kv_indptr,
            last_page_len_cpu=last_page_len,
            kv_indices=kv_indices,
            kv_locations=kv_locations,
            page_size=self.page_size,
            shared_prefixes=groups,
        )
