"""A launched step, kept until its tokens are on the host."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device.device import DeviceEvent, Download
from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import SlotLogprobs, SlotVector, VerifiedDraft
from radixrt.worker.batch import PromptSpan
from radixrt.worker.sampling.logprobs import prompt_logprob_rows
from radixrt.worker.sampling.sampler import SampledTokens


@dataclass(frozen=True, slots=True)
class SpanLogprobs:
    """Log-probabilities of a stretch of a prompt, on the device."""

    span: PromptSpan
    token_ids: Tensor  # [n, 1 + num_top], see radixrt.worker.sampling.logprobs.raw_logprobs
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
