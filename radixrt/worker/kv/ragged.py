"""Lays out a step's flat batch on the host: positions, pages and KV slots, and groups of decoding
sequences whose block tables begin with the same pages.

Rows are sequences: decodes with one token each, then jumps and prefill chunks with several. See
:class:`radixrt.attention.metadata.AttentionMetadata` for the layout that these numbers describe.
Block tables that begin with the same pages hold the same prefix of the radix tree. Attention reads
such pages once for all members of a group (Juravsky et al., 2024, "Hydragen"; FlashInfer calls it a
cascade).
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
        image_spans: tuple[tuple[int, int], ...] = (),
    ) -> AttentionMetadata:
        """The step as attention backends take it.

        Args:
            kv_indices, kv_locations: the arrays of these names on the device.
            groups: of the first rows; the others share nothing.
            image_spans: see ``AttentionMetadata``.
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
            image_spans=image_spans,
        )


GroupedSlots = tuple[NDArray[np.int64], PrefixGroups]
"""Slots [sequences] in an order in which the members of each group are neighbours, and the
groups."""


class PrefixFinder:
    """Groups the decoding slots; it computes the groups again only when the slots or a block table
    changed."""

    def __init__(self) -> None:
        self._slots: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._groups: GroupedSlots | None = None

    def forget(self) -> None:
        """Called when a block table was replaced. Pages appended to a table are its own and change
        no group."""
        self._groups = None

    def group(
        self,
        slots: NDArray[np.int64],
        block_tables: NDArray[np.int32],
        whole_pages: NDArray[np.int64],
    ) -> GroupedSlots:
        """The decoding slots in the order of their groups, and the groups.

        Args:
            slots: [sequences] decoding slots, in ascending order.
            block_tables: [max_slots, max_pages] page ids.
            whole_pages: [sequences] pages that lie wholly before the position that this step
                computes.
        """
        if self._groups is None or not np.array_equal(slots, self._slots):
            self._slots, self._groups = slots, find_groups(slots, block_tables, whole_pages)
        return self._groups


def find_groups(
    slots: NDArray[np.int64], block_tables: NDArray[np.int32], whole_pages: NDArray[np.int64]
) -> GroupedSlots:
    """A grouping that saves nearly as many page reads as possible; arguments as
    :meth:`PrefixFinder.group`.

    >>> tables = np.array([[1, 2, 3], [9, 0, 0], [1, 2, 4]], dtype=np.int32)
    >>> slots, groups = find_groups(np.arange(3), tables, np.array([3, 1, 3]))
    >>> slots.tolist(), groups.indptr.tolist(), groups.num_pages.tolist()
    ([0, 2, 1], [0, 2, 3], [2, 0])
    """
    alone, candidates = _by_first_page(slots, block_tables, whole_pages)
    if not len(candidates):
        count = len(slots)
        return slots, PrefixGroups(np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32))
    longest = whole_pages[candidates].max()
    tables = block_tables[slots[candidates], :longest].astype(np.int32)
    tables[
        np.arange(longest) >= whole_pages[candidates][:, None]
    ] = -1  # pages that are not computed yet
    keys = [
        row.tobytes() for row in tables
    ]  # rows that begin alike are neighbours in any order of their bytes
    ordered = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    groups = _partition(_common_prefixes(tables[ordered]))
    order = candidates[ordered[[member for group in groups for member in group.members]]]
    sizes = [len(group.members) for group in groups] + [1] * len(alone)
    return slots[np.concatenate((order, alone))], PrefixGroups(
        indptr=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        num_pages=np.array([group.pages for group in groups] + [0] * len(alone), dtype=np.int32),
    )


def _by_first_page(
    slots: NDArray[np.int64], block_tables: NDArray[np.int32], whole_pages: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of sequences whose first page is their own, and of those that share it."""
    first = np.where(whole_pages > 0, block_tables[slots, 0], -1 - np.arange(len(slots)))
    _, which, counts = np.unique(first, return_inverse=True, return_counts=True)
    shares = counts[which] > 1
    return np.flatnonzero(~shares), np.flatnonzero(shares)


def _common_prefixes(tables: NDArray[np.int32]) -> list[int]:
    """[rows - 1] pages with which each row of ``tables`` [rows, pages] and the next one begin; -1
    is no page."""
    differs = (tables[:-1] != tables[1:]) | (tables[:-1] < 0)
    ended = np.ones((len(differs), 1), dtype=bool)
    return np.concatenate((differs, ended), axis=1).argmax(axis=1).tolist()


@dataclass(slots=True)
class _Group:
    members: list[int]
    pages: int
    """Pages with which all members begin."""

    @property
    def saved(self) -> int:
        """Page reads that the group saves."""
        return (len(self.members) - 1) * self.pages

    def gain_at(self, pages: int) -> int:
        """Page reads saved more if the members join a group that shares ``pages``; a group of one
        always gains."""
        return len(self.members) * pages - self.saved


@dataclass(slots=True)
class _Subtree:
    """Neighbouring sequences that begin with ``pages`` common pages, and the groups they form."""

    pages: int
    groups: list[_Group]

    def settle(self) -> "_Subtree":
        """Join the groups that gain by it, if together they gain more than the one further read of
        the common pages."""
        joining = [group for group in self.groups if group.gain_at(self.pages) > 0]
        if sum(group.gain_at(self.pages) for group in joining) > self.pages:
            members = [member for group in joining for member in group.members]
            self.groups = [group for group in self.groups if group.gain_at(self.pages) <= 0]
            self.groups.append(_Group(members, self.pages))
        return self


def _partition(common: list[int]) -> list[_Group]:
    """Group sequences in lexicographic order, whose neighbours have ``common`` pages in common.

    The sequences are the leaves of a tree of prefixes. From the leaves up, :meth:`_Subtree.settle`
    decides in each subtree between small groups that share many pages and large groups that share
    few.
    """
    open_subtrees: list[_Subtree] = []
    for index, shared_with_next in enumerate([*common, 0]):
        done = _Subtree(0, [_Group([index], 0)])
        while open_subtrees and open_subtrees[-1].pages > shared_with_next:
            open_subtrees[-1].groups += done.groups
            done = open_subtrees.pop().settle()
        if open_subtrees and open_subtrees[-1].pages == shared_with_next:
            open_subtrees[-1].groups += done.groups
        else:
            open_subtrees.append(_Subtree(shared_with_next, done.groups))
    return open_subtrees.pop().groups
