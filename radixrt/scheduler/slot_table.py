"""The scheduler's copy of the worker's persistent batch: sequence, pages and progress of each slot.

It is kept in columns, so planning a decode step is a few numpy operations for any batch size.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.steps import MAX_DRAFTED
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.sequence import NO_SLOT, Sequence

HEADROOM = 16
"""Positions allocated ahead for a constrained sequence: as many forced tokens can be computed in
one step."""

DRAFT_HEADROOM = 4
"""Positions allocated ahead for drafts of a sequence of which none was accepted in the last
step."""


class SlotTable:
    """``max_slots`` slots for running sequences. All columns are indexed by slot."""

    def __init__(self, max_slots: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * max_slots
        self.in_use = np.zeros(max_slots, dtype=bool)
        self.in_worker = np.zeros(max_slots, dtype=bool)
        """The worker holds the sequence too. It releases a sequence whose last tokens are in
        flight."""
        self.is_decoding = np.zeros(max_slots, dtype=bool)
        """The whole prompt is planned and more tokens are wanted."""
        self.is_deferred = np.zeros(max_slots, dtype=bool)
        """The last result has no token of it, because its mask was not ready. A later step brings
        it."""
        self.planned = np.zeros(max_slots, dtype=np.int64)
        """Leading positions whose KV is computed by the steps planned so far. In decode it runs
        ahead of the known tokens: the input of a planned step may not be known here yet."""
        self.last_position = np.zeros(max_slots, dtype=np.int64)
        """``planned`` at which max_tokens tokens are sampled; the last of them is never an
        input."""
        self.known = np.zeros(max_slots, dtype=np.int64)
        """Tokens known at admission; these are prefilled."""
        self.num_prompt = np.zeros(max_slots, dtype=np.int64)
        self.headroom = np.zeros(max_slots, dtype=np.int64)
        """Positions to allocate beyond the next one, for tokens that a grammar forces, and for
        drafts."""
        self.num_pages = np.zeros(max_slots, dtype=np.int64)
        self.num_tree_pages = np.zeros(max_slots, dtype=np.int64)
        """Leading pages that belong to the tree; the others are the sequence's own."""
        self.num_found_pages = np.zeros(max_slots, dtype=np.int64)
        """Leading pages that were in the tree before the sequence was admitted."""
        self.num_recorded_pages = np.zeros(max_slots, dtype=np.int64)
        """Leading pages that are in the record of a shared pool, beside those in the tree."""
        self.next_state = np.zeros(max_slots, dtype=np.int64)
        """Position behind which the next state of an answer is kept; 0: none is ordered."""
        self.block_tables = np.empty((max_slots, max_pages), dtype=np.int32)
        self._free = list(range(max_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.sequences) - len(self._free)

    def put(self, sequence: Sequence, tree_pages: Pages) -> None:
        """Give a sequence the lowest free slot; ``tree_pages`` hold its cached prefix."""
        slot = sequence.slot = heapq.heappop(self._free)
        self.sequences[slot] = sequence
        self.in_use[slot] = self.in_worker[slot] = True
        self.last_position[slot] = sequence.num_prompt + sequence.max_output - 1
        self.known[slot] = sequence.num_tokens
        self.num_prompt[slot] = sequence.num_prompt
        self.next_state[slot] = 0
        self.expect_drafts(sequence, 0)
        self.set_tree_pages(slot, tree_pages)

    def expect_drafts(self, sequence: Sequence, num_accepted: int) -> None:
        """Set the headroom of a sequence of which this number of draft tokens was accepted, or is
        expected to be.

        The next draft may be twice as long, and a step that is planned already may accept as many
        as the last one.
        """
        headroom = 0 if sequence.grammar is None else HEADROOM
        if sequence.speculates:
            for_drafts = min(DRAFT_HEADROOM + 3 * num_accepted, 2 * MAX_DRAFTED + 2)
            headroom = max(headroom, for_drafts)
        self.headroom[sequence.slot] = headroom

    def set_tree_pages(self, slot: int, tree_pages: Pages) -> None:
        """Set the block table to these pages, which are full and in the tree."""
        count = len(tree_pages)
        self.block_tables[slot, :count] = tree_pages
        self.num_pages[slot] = self.num_tree_pages[slot] = self.num_found_pages[slot] = count
        self.num_recorded_pages[slot] = count
        self.planned[slot] = count * self.page_size

    def append_pages(self, slot: int, pages: Pages) -> None:
        start = int(self.num_pages[slot])
        self.block_tables[slot, start : start + len(pages)] = pages
        self.num_pages[slot] += len(pages)

    def remove(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        slot = sequence.slot
        self.sequences[slot] = None
        self.in_use[slot] = self.in_worker[slot] = self.is_decoding[slot] = False
        self.is_deferred[slot] = False
        self.num_pages[slot] = self.num_tree_pages[slot] = 0
        sequence.slot = NO_SLOT
        heapq.heappush(self._free, slot)

    def block_table(self, slot: int) -> Pages:
        """The pages of a slot, in order of position."""
        return self.block_tables[slot, : self.num_pages[slot]]

    def own_pages(self, slot: int) -> Pages:
        """Pages of the block table that are not in the tree."""
        return self.block_tables[slot, self.num_tree_pages[slot] : self.num_pages[slot]].copy()

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def defer(self, slots: NDArray[np.integer]) -> None:
        """Note the slots that gave no token in the last step, and whose next step computes nothing:
        [n]."""
        self.is_deferred[:] = False
        self.is_deferred[slots] = True
        self.planned[slots] -= self.is_decoding[slots]  # the next step counts one position, or has

    def retire_exhausted(self) -> list[int]:
        """Slots whose last tokens are in flight: the worker releases them, their pages stay until
        the tokens are known."""
        exhausted = np.flatnonzero(self.is_decoding & (self.planned >= self.last_position))
        self.is_decoding[exhausted] = self.in_worker[exhausted] = False
        return exhausted.tolist()

    def pages_missing(self, decoding: NDArray[np.intp]) -> NDArray[np.int64]:
        """Pages that each slot lacks for its next token, 0 or 1: [len(decoding)]."""
        end = self.num_pages[decoding] * self.page_size
        return (self.planned[decoding] >= end).astype(np.int64)

    def pages_ahead(self, decoding: NDArray[np.intp]) -> NDArray[np.int64]:
        """Pages to allocate ahead for tokens that the grammars may force, and for drafts:
        [len(decoding)]."""
        end = self.planned[decoding] + 1 + self.headroom[decoding]
        end = np.minimum(end, self.last_position[decoding])
        pages = -(-end // self.page_size) - self.num_pages[decoding]
        return np.where(self.headroom[decoding] > 0, np.maximum(pages, 0), 0)

    # ------------------------------------------------------------ future need of the running
    # sequences

    def num_output(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Tokens of each answer, those in flight included: [len(slots)]."""
        reached = np.maximum(self.planned[slots], self.known[slots]) - self.num_prompt[slots]
        return np.minimum(reached, self.max_output(slots))

    def max_output(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Most tokens of each answer: [len(slots)]."""
        return self.last_position[slots] - self.num_prompt[slots] + 1

    def num_pages_added(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Pages that each sequence has added to the pool, or will when its prompt is computed:
        [len(slots)]."""
        held = np.maximum(self.num_pages[slots], -(-self.known[slots] // self.page_size))
        return held - self.num_found_pages[slots]

    def num_pages_to_prefill(self, slots: NDArray[np.intp]) -> int:
        """Pages that these sequences lack for their prompts."""
        missing = -(-self.known[slots] // self.page_size) - self.num_pages[slots]
        return int(np.maximum(missing, 0).sum())

    def num_pages_to_come(self, slots: NDArray[np.intp]) -> int:
        """Pages that these sequences will take if every answer becomes as long as allowed."""
        missing = -(-self.last_position[slots] // self.page_size) - self.num_pages[slots]
        return int(np.maximum(missing, 0).sum())
