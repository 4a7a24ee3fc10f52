"""Describes the flat batch of a step to attention, in the ragged layout that FlashInfer reads, and
splits its page table into one per kernel: decodes, prefills, shared pages, own pages."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device.device import Device


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Neighbouring sequences that begin with the same pages, so that a kernel may read these once
    for a group.

    Group ``g`` is sequences ``indptr[g]:indptr[g + 1]``, whose first ``num_pages[g]`` pages are the
    same and lie wholly before each of their queries. Every sequence is in exactly one group. Of
    four sequences the first two share 5 pages:

    >>> groups = PrefixGroups(np.array([0, 2, 3, 4], np.int32), np.array([5, 0, 0], np.int32))
    >>> groups.share, groups.sizes().tolist(), groups.merged().sizes().tolist()
    (True, [2, 1, 1], [2, 2])
    """

    indptr: NDArray[np.int32]  # [groups + 1] into the sequences
    num_pages: NDArray[np.int32]  # [groups]; 0: its sequences share nothing

    @staticmethod
    def none(num_rows: int) -> "PrefixGroups":
        """One group of ``num_rows`` sequences that share nothing."""
        return PrefixGroups(np.array([0, num_rows], np.int32), np.zeros(1, np.int32))

    @property
    def share(self) -> bool:
        """Some group shares pages."""
        return bool(self.num_pages.any())

    def where(self, kept: NDArray[np.bool_]) -> "PrefixGroups":
        """The groups of the sequences for which ``kept`` [sequences] holds."""
        indptr = np.concatenate(([0], np.cumsum(kept))).astype(np.int32)[self.indptr]
        left = np.diff(indptr) > 0
        return PrefixGroups(np.append(indptr[:-1][left], indptr[-1]), self.num_pages[left])

    def then_alone(self, count: int) -> "PrefixGroups":
        """These groups, and behind them ``count`` sequences that share nothing."""
        others = self.indptr[-1] + np.arange(1, count + 1, dtype=np.int32)
        return PrefixGroups(
            np.concatenate((self.indptr, others)),
            np.concatenate((self.num_pages, np.zeros(count, np.int32))),
        )

    def first(self, num_rows: int) -> "PrefixGroups":
        """The groups that lie within the first ``num_rows`` sequences, merged; the rest of these
        share nothing."""
        within = int(np.searchsorted(self.indptr, num_rows, side="right")) - 1
        return PrefixGroups(
            np.append(self.indptr[: within + 1], np.int32(num_rows)),
            np.append(self.num_pages[:within], np.int32(0)),
        ).merged()

    def sizes(self) -> NDArray[np.int32]:
        """Sequences of each group: [groups]"""
        return np.diff(self.indptr)

    def merged(self) -> "PrefixGroups":
        """The groups without empty ones, and with neighbouring groups that share nothing as one:
        kernels choose the size of their tiles by the mean size of the groups."""
        kept = self.sizes() > 0
        starts, num_pages = self.indptr[:-1][kept], self.num_pages[kept]
        alone = num_pages == 0
        first = ~(alone & np.concatenate(([False], alone[:-1])))
        return PrefixGroups(np.append(starts[first], self.indptr[-1]), num_pages[first])

    def at_most(self, count: int) -> "PrefixGroups":
        """Exactly ``count`` groups: those that save the most reads, filled up with empty ones."""
        groups = self
        if len(groups.num_pages) > count:
            saved = (groups.sizes() - 1) * groups.num_pages
            best = np.argsort(-saved, kind="stable")[: (count - 1) // 2]  # others may lie between
            kept = np.zeros_like(groups.num_pages)
            kept[best] = groups.num_pages[best]
            groups = PrefixGroups(groups.indptr, kept).merged()
        more = count - len(groups.num_pages)
        return PrefixGroups(
            np.concatenate((groups.indptr, np.full(more, groups.indptr[-1]))),
            np.concatenate((groups.num_pages, np.zeros(more, np.int32))),
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """All scheduled tokens of a step, prefill and decode mixed, as one flat batch.

    Sequence ``i`` contributes query tokens ``qo_indptr[i]:qo_indptr[i+1]`` of the flat batch. Its
    KV, the new tokens included, lies in pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``, the last
    of which holds ``last_page_len[i]`` tokens. Queries are the last ``q_len`` positions of the
    sequence, so causal masks are aligned at the bottom right. A backend may ignore
    ``shared_prefixes``.

    The ``*_cpu`` tensors are on the host (pinned where that matters): FlashInfer plans on the host.
    """

    qo_indptr_cpu: Tensor  # [batch + 1] int32
    kv_indptr_cpu: Tensor  # [batch + 1] int32, counts pages
    last_page_len_cpu: Tensor  # [batch] int32, in 1..page_size
    kv_indices: Tensor  # [total_pages] int32, on the device
    kv_locations: (
        Tensor  # [num_tokens] int64, on the device: page * page_size + offset of each new token
    )
    page_size: int
    shared_prefixes: PrefixGroups | None = None
    """None: nothing is known to be shared."""
    image_spans: tuple[tuple[int, int], ...] = ()
    """First row and number of rows of each image whose tokens see one another in both
    directions."""

    @property
    def num_tokens(self) -> int:
        return self.kv_locations.numel()

    def of_rows(self, rows: Tensor) -> "AttentionMetadata | None":
        """The step with these queries alone [n] int64, in the order of the flat batch; None: some
        are not the last ones of their sequence. Sequences without any are left out."""
        wanted, ends = rows.cpu(), self.qo_indptr_cpu[1:]
        of = torch.searchsorted(ends, wanted.to(ends.dtype), right=True)
        counts = of.bincount(minlength=len(ends))
        kept = counts > 0
        starts = counts.cumsum(0) - counts
        if not torch.equal(wanted, (ends - counts - starts)[of] + torch.arange(len(wanted))):
            return None
        pages = self.kv_indptr_cpu.diff()
        shared = self.shared_prefixes
        return AttentionMetadata(
            qo_indptr_cpu=_summed(counts[kept]),
            kv_indptr_cpu=_summed(pages[kept]),
            last_page_len_cpu=self.last_page_len_cpu[kept],
            kv_indices=self.kv_indices[kept.repeat_interleave(pages).to(self.kv_indices.device)],
            kv_locations=self.kv_locations[rows],
            page_size=self.page_size,
            shared_prefixes=None if shared is None else shared.where(kept.numpy()),
        )

    def kv_lengths(self) -> Tensor:
        """Tokens of KV of each sequence, the new ones included: [batch] int32 on the host."""
        pages = self.kv_indptr_cpu[1:] - self.kv_indptr_cpu[:-1]
        return (pages - 1) * self.page_size + self.last_page_len_cpu


def _summed(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


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
