"""Holds the states of recurrent layers: those of the slots, and those that the scheduler keeps."""

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.states import StateSpec, StateStep, StateTables
from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import EMPTY_STATE, SAME_STATE, KeepState, StepPlan


class SlotStates:
    """The tables of states: row ``i`` is the working state of slot ``i``, and behind those of all
    slots are the kept states.

    Args:
        specs: one for each layer.
        num_slots: sequences in the batch at a time.
        num_kept: states that the scheduler may keep.
    """

    def __init__(self, specs: list[StateSpec], num_slots: int, num_kept: int) -> None:
        self._num_slots = num_slots
        rows = num_slots + num_kept
        self.tables = StateTables(
            [
                tuple(torch.zeros((rows, *t.shape), dtype=t.dtype) for t in spec.tensors)
                for spec in specs
            ]
        )
        self._copies: list[tuple[int, int]] = []
        """Rows to copy before the next step: from, to."""
        self._orders: dict[int, list[KeepState]] = {}
        """What is to be kept of each slot, in the order of positions."""

    def apply(self, plan: StepPlan) -> None:
        """Take what a plan says of states, after its releases."""
        for admit in plan.admit:
            self.release(admit.slot)
            self._start(admit.slot, max(admit.state, EMPTY_STATE))
        for table in plan.block_tables:
            self._start(table.slot, table.state)
        for keep in plan.keep:
            self._orders.setdefault(keep.slot, []).append(keep)

    def _start(self, slot: int, state: int) -> None:
        """Let a slot go on from a kept state, or from that of an empty sequence."""
        if state != SAME_STATE:
            self._copies.append((self._num_slots + state if state >= 0 else -1, slot))

    def release(self, slot: int) -> None:
        """Forget what is to be kept of a slot."""
        self._orders.pop(slot, None)

    def plan(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], indptr: TokenIds
    ) -> list[int]:
        """Prepare the tables for one step; returns the kept states that it writes.

        Args:
            slots: [sequences] of the flat batch.
            starts: [sequences] positions of their first tokens.
            indptr: [sequences + 1] into the flat batch.
        """
        self.tables.copy(self._copies)
        self._copies = []
        counts, ends, kept = np.zeros(len(slots) + 1, dtype=np.int32), [], []
        for index, slot in enumerate(slots.tolist() if self._orders else ()):
            if slot not in self._orders:
                continue
            start, first, last = int(starts[index]), int(indptr[index]), int(indptr[index + 1])
            orders = [one for one in self._orders.pop(slot) if one.position > start]
            reached = [one for one in orders if one.position - start <= last - first]
            if orders := orders[len(reached) :]:
                self._orders[slot] = orders
            counts[index + 1] = len(reached)
            ends += [first + one.position - start for one in reached]
            kept += [one.state for one in reached]
        self.tables.plan(
            StateStep(
                torch.from_numpy(indptr.astype(np.int32)),
                torch.from_numpy(slots.astype(np.int32)),
                torch.from_numpy(np.cumsum(counts, dtype=np.int32)),
                torch.tensor(ends, dtype=torch.int32),
                torch.tensor(kept, dtype=torch.int32) + self._num_slots,
            )
        )
        return kept


def state_bytes(specs: list[StateSpec]) -> int:
    """Memory of one state over all layers, on this rank."""
    return sum(spec.num_bytes for spec in specs)
