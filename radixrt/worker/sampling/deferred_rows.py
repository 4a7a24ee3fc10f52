"""Keeps the logits of rows whose masks are not ready, so that a later step samples their tokens
without a forward pass."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device.device import Device
from radixrt.worker.drafts.verification import NO_DRAFT, first_rows


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Rows that sample a token; tensors are on the device."""

    slots: NDArray[np.int64]  # [rows]
    slots_on_device: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, of the sampled tokens in their sequences
    logits: Tensor  # [rows, vocab] float32
    drafted: NDArray[np.int64] | None = (
        None  # [rows] draft token behind each row; None: there are no drafts
    )

    @property
    def first(self) -> NDArray[np.bool_]:
        """[rows] whether a row is the first of its slot."""
        if self.drafted is None:
            return np.ones(len(self.slots), dtype=bool)
        return first_rows(self.drafted)

    def take(self, rows: NDArray[np.int64], device: Device) -> "SamplingRows":
        """Copies of some rows."""
        (index,) = device.upload(rows)
        return SamplingRows(
            self.slots[rows],
            self.slots_on_device[index],
            self.positions[index],
            self.logits[index],
            None if self.drafted is None else self.drafted[rows],
        )


class DeferredRows:
    """The rows that wait for their masks."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: SamplingRows | None = None
        self._retired: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return self._rows is not None and slot in self._rows.slots

    def retire(self, slot: int) -> bool:
        """The sequence of a slot needs no more than the token that it waits for; False if it waits
        for none."""
        if slot not in self:
            return False
        self._retired.add(slot)
        return True

    def drop(self, slot: int) -> bool:
        """Forget the row of a slot; False if it has none."""
        if self._rows is None or slot not in self:
            return False
        self._hold(self._rows, np.flatnonzero(self._rows.slots != slot))
        self._retired.discard(slot)
        return True

    def join(self, rows: SamplingRows) -> SamplingRows:
        """The rows of a step, and after them those that wait."""
        deferred = self._rows
        if deferred is None:
            return rows
        drafted = rows.drafted
        if drafted is not None:
            drafted = np.concatenate((drafted, np.full(len(deferred.slots), NO_DRAFT)))
        return SamplingRows(
            np.concatenate((rows.slots, deferred.slots)),
            torch.cat((rows.slots_on_device, deferred.slots_on_device)),
            torch.cat((rows.positions, deferred.positions)),
            torch.cat((rows.logits, deferred.logits)),
            drafted,
        )

    def keep(self, rows: SamplingRows, ready: NDArray[np.bool_] | None) -> SamplingRows:
        """Let the joined rows of a step that are not ready wait, without their drafts; returns
        those that are sampled now.

        Args:
            ready: [rows]; None: all are.
        """
        if ready is None:
            self._rows = None
            return rows
        self._hold(rows, np.flatnonzero(~ready & rows.first))
        return rows.take(np.flatnonzero(ready), self._device)

    def take_retired(self, slots: NDArray[np.int64]) -> list[int]:
        """Forget and return the ones of ``slots``, which are sampled now, whose sequences need no
        more."""
        gone = self._retired.intersection(slots.tolist()) if self._retired else set()
        self._retired -= gone
        return list(gone)

    def _hold(self, rows: SamplingRows, kept: NDArray[np.int64]) -> None:
        taken = rows.take(kept, self._device) if len(kept) else None
        self._rows = None if taken is None else dataclasses.replace(taken, drafted=None)
