"""Holds the states of recurrent layers: those of the slots, and those that the scheduler keeps.

A draft that is rejected must leave no trace. So a step that verifies drafts also copies the state
behind each token before a draft token, and the right copy becomes the state of its slot.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.states import StateSpec, StateStep, StateTables
from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import EMPTY_STATE, MAX_DRAFTED, SAME_STATE, KeepState, StepPlan
from radixrt.worker.kv.shared_memory import SharedMemory, rounded_up

DRAFT_ROWS = 2 * MAX_DRAFTED
"""Draft tokens of a step, over all slots, where the states are small."""

DRAFT_BYTES = 1 << 30
"""Memory of the copies that a step with drafts makes, where the states are large."""


@dataclass(slots=True)
class _Drafted:
    """A slot with drafts, in the step that verifies them."""

    end: int
    """Position behind the last draft token."""
    rows: range
    """The copies of its state, before each draft token."""
    orders: list[KeepState]
    """What is to be kept at the positions of the copies, or behind the last token."""


class SlotStates:
    """The tables of states. Row ``i`` is the working state of slot ``i``; behind those of all slots
    are the kept states, and the copies of steps with drafts.

    Args:
        num_kept: states that the scheduler may keep.
        shared: memory that outlives this process, in which :func:`shared_state_bytes` are left.
    """

    def __init__(
        self,
        specs: list[StateSpec],
        num_slots: int,
        num_kept: int,
        shared: SharedMemory | None = None,
    ) -> None:
        self._num_slots = num_slots
        self._first_copy = num_slots + num_kept
        num_copies = _num_copies(specs)
        rows = self._first_copy + num_copies
        empty = torch.zeros if shared is None else shared.take
        self.tables = StateTables(
            [tuple(empty((rows, *t.shape), dtype=t.dtype) for t in spec.tensors) for spec in specs]
        )
        self._copies: list[tuple[int, int]] = []
        """Rows to copy before the next step: from, to."""
        self._orders: dict[int, list[KeepState]] = {}
        """What is to be kept of each slot, in the order of positions."""
        self._drafted: dict[int, _Drafted] = {}
        self._free_copies = self._num_copies = num_copies

    @property
    def kept(self) -> list[torch.Tensor]:
        """The rows of the states that the scheduler keeps: [num_kept, *shape] of each table."""
        tables = (table for layer in self.tables.layers for table in layer)
        return [table[self._num_slots : self._first_copy] for table in tables]

    # ------------------------------------------------------------ changes by a plan

    def apply(self, plan: StepPlan) -> None:
        """Take what a plan says of states, after its releases."""
        for admit in plan.admit:
            self.release(admit.slot)
            self._start(admit.slot, max(admit.state, EMPTY_STATE))
        for table in plan.block_tables:
            self._start(table.slot, table.state)
        for keep in plan.keep:
            self._orders.setdefault(keep.slot, []).append(keep)
        self._free_copies = self._num_copies

    def _start(self, slot: int, state: int) -> None:
        """Let a slot go on from a kept state, or from that of an empty sequence."""
        if state != SAME_STATE:
            self._copies.append((self._num_slots + state if state >= 0 else -1, slot))

    def release(self, slot: int) -> None:
        """Forget what is to be kept of a slot."""
        self._orders.pop(slot, None)

    # ------------------------------------------------------------ a step

    def room_for_drafts(self) -> int:
        """Draft tokens that the next step can still verify."""
        return self._free_copies

    def draft(self, num_tokens: int) -> None:
        """The next step verifies so many draft tokens of a slot."""
        self._free_copies -= num_tokens

    def plan(
        self,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        indptr: TokenIds,
        num_drafts: dict[int, int],
    ) -> list[int]:
        """Prepare the tables for one step; returns the kept states that it writes for certain.

        Args:
            slots: [sequences] of the flat batch.
            starts: [sequences] positions of their first tokens.
            indptr: [sequences + 1] into the flat batch.
            num_drafts: draft tokens at the end of sequences, by slot.
        """
        self.tables.copy(self._copies)
        self._copies, self._drafted = [], {}
        written: list[int] = []
        keeps: list[list[tuple[int, int]]] = [[] for _ in slots]
        copies = iter(range(self._first_copy, self._first_copy + self._num_copies))
        for index, slot in enumerate(slots.tolist() if self._orders or num_drafts else ()):
            start, first, last = int(starts[index]), int(indptr[index]), int(indptr[index + 1])
            end, drafts = start + last - first, num_drafts.get(slot, 0)
            orders = [one for one in self._orders.pop(slot, ()) if one.position > start]
            reached = [one for one in orders if one.position <= end]
            if orders := orders[len(reached) :]:
                self._orders[slot] = orders
            # where a copy is made too, the order is carried out from the copy
            certain = [one for one in reached if one.position < end - drafts or not drafts]
            written += [one.state for one in certain]
            rows = [(one.position, self._num_slots + one.state) for one in certain]
            if drafts:
                copied = [next(copies) for _ in range(drafts)]
                rows += zip(range(end - drafts, end), copied, strict=True)
                self._drafted[slot] = _Drafted(
                    end, range(copied[0], copied[-1] + 1), reached[len(certain) :]
                )
            keeps[index] = [(first + position - start, row) for position, row in sorted(rows)]
        flat = [keep for of_sequence in keeps for keep in of_sequence]
        counts = accumulate((len(of_sequence) for of_sequence in keeps), initial=0)
        columns = indptr, slots, list(counts), [end for end, _ in flat], [row for _, row in flat]
        self.tables.plan(StateStep(*(torch.tensor(c, dtype=torch.int32) for c in columns)))
        return written

    def verified(self, slot: int, num_rejected: int) -> list[int]:
        """Take the draft tokens at the end of a slot back that were rejected; returns the kept
        states that the others have written."""
        drafted = self._drafted.pop(slot)
        end = drafted.end - num_rejected
        first = drafted.end - len(drafted.rows)
        source = {position: row for position, row in enumerate(drafted.rows, first)}
        pairs = [(source[end], slot)] if num_rejected else []
        written, missed = [], []
        for order in drafted.orders:
            if order.position > end:
                missed.append(order)
                continue
            row = source.get(order.position, slot)
            pairs.append((row, self._num_slots + order.state))
            written.append(order.state)
        self.tables.copy(pairs)
        if missed:
            self._orders[slot] = [*missed, *self._orders.get(slot, ())]
        return written


def shared_state_bytes(specs: list[StateSpec], num_slots: int, num_kept: int) -> int:
    """Memory of all tables, each in whole huge pages."""
    rows = num_slots + num_kept + _num_copies(specs)
    tensors = [tensor for spec in specs for tensor in spec.tensors]
    return sum(rounded_up(rows * math.prod(one.shape) * one.dtype.itemsize) for one in tensors)


def _num_copies(specs: list[StateSpec]) -> int:
    """Rows for the copies of a step with drafts."""
    return min(DRAFT_ROWS, DRAFT_BYTES // max(1, state_bytes(specs)))


def state_bytes(specs: list[StateSpec]) -> int:
    """Memory of one state over all layers, on this rank."""
    return sum(spec.num_bytes for spec in specs)
