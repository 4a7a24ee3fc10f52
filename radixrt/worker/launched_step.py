"""A launched step, kept until its tokens are on the host; and the two orders in which a worker
launches steps and reads their tokens: in sequence on a CPU, overlapping on a GPU."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device.device import Device, DeviceEvent, Download
from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import SlotLogprobs, SlotVector, VerifiedDraft
from radixrt.worker.batch import PersistentBatch, PromptSpan, StepInputs
from radixrt.worker.sampling.matchers import SlotMatchers
from radixrt.worker.sampling.sampler import SampledTokens, prompt_logprob_rows
from radixrt.worker.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class SpanLogprobs:
    """Log-probabilities of a stretch of a prompt, on the device."""

    span: PromptSpan
    token_ids: Tensor  # [n, 1 + num_top], see radixrt.worker.sampling.sampler.raw_logprobs
    logprobs: Tensor  # as token_ids


@dataclass(frozen=True, slots=True)
class Vectors:
    """The numbers of prompts, on the device."""

    slots: list[int]
    lengths: list[int]
    """Numbers of each slot."""
    values: Tensor  # [slots, longest] float32

    def read(self, values: NDArray[np.float32]) -> list[SlotVector]:
        """The vectors of each slot, given ``values`` on the host; numbers that are not finite are
        left out."""
        rows = (row[:length] for row, length in zip(values, self.lengths, strict=True))
        packed = (row.tobytes() if np.isfinite(row).all() else b"" for row in rows)
        return [SlotVector(slot, one) for slot, one in zip(self.slots, packed, strict=True)]


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. Its slots may have been released, or given to others, when its tokens
    come."""

    step_id: int
    decoding: int
    """Slots whose prompts were complete before."""
    draft_s: float
    """Seconds that drafting took; 0: nothing was drafted or looked for."""
    head_s: float
    """The part of them that a draft head took."""
    prompt_tokens: int
    slots: NDArray[
        np.int64
    ]  # [rows] that sample a token; a slot has several if drafts were accepted
    deferred: NDArray[np.int64]  # slots whose masks are not ready
    advanced: dict[int, int]
    """Tokens beyond the one of a decode step, which were forced, or drafted and accepted, by
    slot."""
    drafts: list[VerifiedDraft]
    sampled: SampledTokens | None
    """None: no row samples."""
    prompt_logprobs: list[SpanLogprobs]
    vectors: Vectors | None
    """None: no prompt gives numbers."""
    download: Download
    launched: DeviceEvent
    computed: DeviceEvent
    """The forward pass is done."""
    sampled_all: DeviceEvent
    waited_s: float
    begun: float
    """``time.perf_counter`` in seconds when its plan was taken up."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """The sampled token and those that follow it, known before it was sampled, by slot. The matcher
    has taken them."""
    failed: set[int] = field(default_factory=set)
    """Slots whose masks allow no token."""
    kept_states: list[int] = field(default_factory=list)
    """The kept states of recurrent layers that it writes."""
    released: set[int] = field(default_factory=set)
    """Slots whose sequences were released since the launch."""

    def read(
        self,
    ) -> tuple[TokenIds, list[SlotLogprobs], list[SlotLogprobs], list[SlotVector]]:
        """Wait for the tokens. Returns token ids [rows], the log-probabilities of answers and of
        prompts, and vectors."""
        arrived = self.download.wait()
        vectors: list[SlotVector] = []
        if self.vectors is not None:
            values, *arrived = arrived
            vectors = self.vectors.read(values.numpy())
        in_prompts = len(arrived) - 2 * len(self.prompt_logprobs)
        token_ids: TokenIds = np.empty(0, dtype=np.int32)
        rows: list[SlotLogprobs] = []
        if self.sampled is not None:
            token_ids, rows = self.sampled.read(arrived[:in_prompts])
        pairs = zip(arrived[in_prompts::2], arrived[in_prompts + 1 :: 2], strict=True)
        prompt_rows: list[SlotLogprobs] = []
        for part, (ids, logprobs) in zip(self.prompt_logprobs, pairs, strict=True):
            prompt_rows += prompt_logprob_rows(ids, logprobs, part.span.slot, part.span.num_top)
        return token_ids, rows, prompt_rows, vectors


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
