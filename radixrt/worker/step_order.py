"""The two orders in which a worker launches steps and reads their tokens: in sequence on a CPU,
overlapping on a GPU."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from radixrt.device.device import Device, DeviceEvent
from radixrt.messages.ids import TokenIds
from radixrt.worker.batch import PersistentBatch, StepInputs
from radixrt.worker.launched_step import LaunchedStep
from radixrt.worker.sampling.matchers import SlotMatchers
from radixrt.worker.sampling.state import SamplingState

SHORTEST_JUMP = 4
"""Where steps overlap, fewer forced tokens than this are sampled one by one. A jump cannot use a
captured graph, and saves one step less than it has tokens. Not measured on a GPU yet."""


class StepOrder(ABC):
    """Decides at which point of a step the host fills masks, takes forced tokens and reads
    results."""

    overlaps: bool
    """The tokens of a step are read after the next step is launched. Then the token before a draft
    is not on the host in time, so nothing is drafted."""

    def __init__(
        self, batch: PersistentBatch, sampling: SamplingState, matchers: SlotMatchers
    ) -> None:
        self._batch = batch
        self._sampling = sampling
        self._matchers = matchers

    @abstractmethod
    def before_launch(self, inputs: StepInputs, drafts: Mapping[int, TokenIds]) -> None:
        """Do the host's work that can run beside the forward pass of ``inputs``.

        Args:
            drafts: by slot, verified in this step.
        """

    @abstractmethod
    def force_ahead(self, inputs: StepInputs) -> dict[int, list[int]]:
        """The tokens that grammars force in this launched step, by slot, before it has sampled."""

    @abstractmethod
    def force_after(
        self, step: LaunchedStep, slots: NDArray[np.int64], token_ids: TokenIds
    ) -> dict[int, list[int]]:
        """The tokens that grammars force behind a step's tokens, by slot.

        Args:
            slots: [rows]
            token_ids: [rows], which the matchers have taken.
        """

    @abstractmethod
    def seconds(self, step: LaunchedStep) -> float:
        """The time that a step has taken, which is over."""

    def _jump(self, slot: int, tokens: list[int]) -> None:
        """Compute ``tokens`` in the slot's next step; the first is or will be sampled."""
        if len(tokens) > 1:
            self._batch.force(slot, np.array(tokens, dtype=np.int32))
            self._sampling.count(slot, tokens[1:])


class InSequence(StepOrder):
    """A step is over when its launch returns."""

    overlaps = False

    def before_launch(self, inputs: StepInputs, drafts: Mapping[int, TokenIds]) -> None:
        self._matchers.begin_masks(inputs.sampling_slots, drafts)

    def force_ahead(self, inputs: StepInputs) -> dict[int, list[int]]:
        return {}

    def force_after(
        self, step: LaunchedStep, slots: NDArray[np.int64], token_ids: TokenIds
    ) -> dict[int, list[int]]:
        sampled = dict(zip(slots.tolist(), token_ids.tolist(), strict=True))
        forced = self._matchers.take_forced(slots[token_ids >= 0])
        for slot, tokens in forced.items():
            self._jump(slot, [sampled[slot], *tokens])
        return forced

    def seconds(self, step: LaunchedStep) -> float:
        return time.perf_counter() - step.begun


class Overlapping(StepOrder):
    """A step is launched before the tokens of the step ahead of it are on the host."""

    overlaps = True

    def __init__(
        self, batch: PersistentBatch, sampling: SamplingState, matchers: SlotMatchers
    ) -> None:
        super().__init__(batch, sampling, matchers)
        self._last_end: DeviceEvent | None = None

    def before_launch(self, inputs: StepInputs, drafts: Mapping[int, TokenIds]) -> None:
        """Fill no masks yet: the matchers lack the tokens of the step ahead."""

    def force_ahead(self, inputs: StepInputs) -> dict[int, list[int]]:
        """The first forced token is the one that this step is about to sample; the step after this
        one computes all of them."""
        forced = self._matchers.take_forced(inputs.sampling_slots, SHORTEST_JUMP)
        for slot, tokens in forced.items():
            self._matchers.sample_next(slot, tokens[0])
            self._jump(slot, tokens)
        return forced

    def force_after(
        self, step: LaunchedStep, slots: NDArray[np.int64], token_ids: TokenIds
    ) -> dict[int, list[int]]:
        return {slot: tokens[1:] for slot, tokens in step.forced.items()}

    def seconds(self, step: LaunchedStep) -> float:
        """The device's time since the step ahead, if that is shorter than the host's."""
        ahead = step.launched if self._last_end is None else self._last_end
        self._last_end = step.sampled_all
        return min(time.perf_counter() - step.begun, step.sampled_all.seconds_since(ahead))


def step_order(
    device: Device, batch: PersistentBatch, sampling: SamplingState, matchers: SlotMatchers
) -> StepOrder:
    """The order of a device."""
    kind = Overlapping if device.overlaps else InSequence
    return kind(batch, sampling, matchers)
