"""Describes the flat batch of a step to attention, in the ragged layout that FlashInfer reads."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
            qo_indptr_cpu=_indptr(counts[kept]),
            kv_indptr_cpu=_indptr(pages[kept]),
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


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
