"""The worker's persistent batch: step plans change it, forward passes read it.

A plan holds only changes. The other inputs of a forward pass (block tables, lengths, the tokens sampled last) stay here
between steps. The sampled tokens stay on the device, so a decode step needs nothing from the scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.metadata import AttentionMetadata, PrefixGroups
from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import Device
from radixrt.messages.ids import TokenIds, num_ids, unpack_ids
from radixrt.messages.pooling import Pool
from radixrt.messages.steps import Admit, StepPlan
from radixrt.worker.kv.ragged import RaggedStep
from radixrt.worker.kv.shared_prefixes import PrefixFinder


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive prompt positions for whose next tokens a request asks log-probabilities."""

    slot: int
    first_row: int
    """Into the flat batch."""
    next_tokens: TokenIds
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The end of a prompt that gives numbers in place of a token."""

    slot: int
    row: int
    """Into the flat batch."""
    pool: Pool


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass: decode rows first, then jumps and prefill chunks."""

    token_ids: torch.Tensor  # [num_tokens] int64, on the device
    positions: torch.Tensor  # [num_tokens] int64, on the device
    attention: AttentionMetadata
    graph_rows: int | None
    """Rows of the captured graph that computes this step: first those that sample, then padding. None: no graph does."""
    sampling_slots: NDArray[np.int64]  # [rows] slots that sample a token
    sampling_slots_on_device: torch.Tensor  # [rows] int64
    sampling_rows: torch.Tensor  # [rows] int64 into the flat batch, on the device
    sampling_positions: torch.Tensor  # [rows] int64, of the sampled tokens in their sequences
    pooled: list[PooledRow]
    prompt_spans: list[PromptSpan]
    jumps: "Jumps"


@dataclass(frozen=True, slots=True)
class Jumps:
    """Slots whose next tokens a grammar forces, so that several are computed in one step."""

    slots: list[int]
    token_ids: list[TokenIds]
    """Inputs of this step."""
    complete: list[bool]
    """All forced tokens are computed: the slot samples again."""

    @property
    def beyond(self) -> list[int]:
        """Tokens by which each slot advances beyond the one of a plain decode step."""
        return [len(tokens) - 1 for tokens in self.token_ids]


NO_JUMPS = Jumps([], [], [])
NO_TOKENS = np.empty(0, dtype=np.int32)


class PersistentBatch:
    """State of every slot between steps; columns are indexed by slot."""

    def __init__(
        self,
        max_slots: int,
        max_pages: int,
        page_size: int,
        device: Device,
        *,
        spare_page: int = 0,
        graph_rows: Callable[[int], int | None] | None = None,
    ) -> None:
        """
        Args:
            max_slots: sequences in the batch at a time.
            max_pages: pages of one sequence.
            page_size: tokens in a page.
            device: computes the steps.
            spare_page: page that padding writes to; no sequence has it.
            graph_rows: from the rows of a decode step to those that it is padded to, or None where it is not padded; None:
                no step is padded.
        """
        self.page_size = page_size
        self._graph_rows = graph_rows
        self._device = device
        self._spare_page = spare_page
        self.block_tables = np.zeros((max_slots, max_pages), dtype=np.int32)
        self.num_pages = np.zeros(max_slots, dtype=np.int64)
        self.computed = np.zeros(max_slots, dtype=np.int64)
        """Positions whose KV is in the cache."""
        self.is_decoding = np.zeros(max_slots, dtype=bool)
        """The prompt is computed; each step advances the slot by one token."""
        (self.last_tokens,) = device.upload(np.zeros(max_slots, dtype=np.int64))
        """Sampled last, input of the next decode step."""
        self._prefixes = PrefixFinder()
        self._prompts: dict[int, Admit] = {}
        self._forced: dict[int, TokenIds] = {}
        """Inputs of slots whose next tokens are known: the sampled one, and those forced after it."""

    # ------------------------------------------------------------ changes by a plan

    def release(self, slot: int) -> None:
        self.is_decoding[slot] = False
        self._prompts.pop(slot, None)
        self._forced.pop(slot, None)

    def admit(self, admit: Admit) -> None:
        slot = admit.slot
        self._prompts[slot] = admit
        self.computed[slot] = admit.num_cached
        self.is_decoding[slot] = False
        self.set_block_table(slot, unpack_ids(admit.pages))

    def set_block_table(self, slot: int, pages: NDArray[np.int32]) -> None:
        self._prefixes.forget()
        self.block_tables[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)

    def extend(self, slots: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """Append page ``pages[i]`` to the block table of ``slots[i]``; a slot's entries are adjacent."""
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        rank = np.arange(len(slots)) - np.repeat(starts, np.diff(starts, append=len(slots)))
        self.block_tables[slots, self.num_pages[slots] + rank] = pages
        np.add.at(self.num_pages, slots, 1)

    # ------------------------------------------------------------ a step

    def next_step(self, plan: StepPlan) -> StepInputs:
        """The forward pass of a plan whose changes have been applied; advances the slots."""
        jumps = self._take_jumps()
        decoding, groups = self._group_decoding(jumps.slots)
        chunk_slots = np.array([chunk.slot for chunk in plan.prefill], dtype=np.int64)
        self.computed[chunk_slots] = [chunk.start for chunk in plan.prefill]
        chunk_lengths = [chunk.num_tokens for chunk in plan.prefill]
        many_lengths = np.array([*map(len, jumps.token_ids), *chunk_lengths], dtype=np.int64)
        slots = np.concatenate((decoding, np.array(jumps.slots, dtype=np.int64), chunk_slots))
        lengths = np.concatenate((np.ones(len(decoding), dtype=np.int64), many_lengths))
        starts = self.computed[slots]
        self.computed[slots] = starts + lengths
        ended, pooled = self._finish_prompts(chunk_slots)
        samples = np.concatenate(
            (
                np.ones(len(decoding), dtype=bool),
                np.array(jumps.complete, dtype=bool),
                ended & ~pooled,
            )
        )
        prompt_tokens = [unpack_ids(self._prompts[c.slot].token_ids)[c.start : c.start + c.num_tokens]
                         for c in plan.prefill]  # fmt: skip
        step = RaggedStep.of(self.block_tables, self.page_size, slots, lengths, starts)
        chunk_rows = step.qo_indptr[len(decoding) + len(jumps.slots) :]
        return self._inputs(
            step,
            decoding,
            groups,
            [*jumps.token_ids, *prompt_tokens],
            (slots[samples], step.qo_indptr[1:][samples] - 1, self.computed[slots][samples]),
            self._pooled_rows(chunk_slots, chunk_rows[1:] - 1, ended & pooled),
            self._prompt_spans(plan, chunk_rows[:-1]),
            jumps,
        )

    def _inputs(
        self,
        step: RaggedStep,
        decoding: NDArray[np.int64],
        groups: PrefixGroups,
        known_tokens: list[TokenIds],
        sampling: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]],
        pooled: list[PooledRow],
        prompt_spans: list[PromptSpan],
        jumps: Jumps,
    ) -> StepInputs:
        """The inputs of a step, sent to the device in one transfer.

        Args:
            decoding: slots of the first rows, which decode.
            groups: of these rows.
            known_tokens: inputs of the other rows.
            sampling: rows that sample a token, each [rows]: slots, their rows of the flat batch, and positions of the new
                tokens.
        """
        sampling_slots, sampling_rows, sampling_positions = sampling
        graph_rows = None
        if self._graph_rows is not None and not known_tokens:
            graph_rows = self._graph_rows(len(decoding))
        if graph_rows is not None:
            step = step.padded(graph_rows, self._spare_page)
            decoding = np.concatenate((decoding, np.zeros(graph_rows - len(decoding), np.int64)))
        known = np.concatenate(known_tokens) if known_tokens else NO_TOKENS
        decoded, known_ids, positions, kv_indices, kv_locations, slots, rows, places = (
            self._device.upload(
                decoding,
                known.astype(np.int64),
                step.positions,
                step.kv_indices,
                step.kv_locations,
                sampling_slots,
                sampling_rows.astype(np.int64),
                sampling_positions,
            )
        )
        token_ids = self.last_tokens[decoded]
        return StepInputs(
            token_ids=torch.cat((token_ids, known_ids)) if known_tokens else token_ids,
            positions=positions,
            attention=step.metadata(kv_indices, kv_locations, self._device, groups),
            graph_rows=graph_rows,
            sampling_slots=sampling_slots,
            sampling_slots_on_device=slots,
            sampling_rows=rows,
            sampling_positions=places,
            pooled=pooled,
            prompt_spans=prompt_spans,
            jumps=jumps,
        )

    def record(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the sampled ``tokens`` of ``slots``, both [rows] on the device, as the next inputs."""
        self.last_tokens[slots] = tokens

    def hold(self, slots: NDArray[np.int64]) -> None:
        """Compute nothing of ``slots`` [n], whose tokens are not sampled yet."""
        self.is_decoding[slots] = False

    def resume(self, slots: NDArray[np.int64]) -> None:
        """Go on with ``slots`` [n], whose tokens are sampled now."""
        self.is_decoding[slots] = True

    def force(self, slot: int, token_ids: TokenIds) -> None:
        """Let the next inputs of a decoding slot be its sampled token and those forced after it."""
        self._forced[slot] = token_ids

    def _group_decoding(self, jumping: list[int]) -> tuple[NDArray[np.int64], PrefixGroups]:
        """The slots that advance by one token, those that share a prefix side by side, and their groups."""
        decoding = np.flatnonzero(self.is_decoding)
        whole_pages = self.computed[decoding] // self.page_size
        slots, groups = self._prefixes.group(decoding, self.block_tables, whole_pages)
        if not jumping:
            return slots, groups
        kept = ~np.isin(slots, jumping)
        return slots[kept], groups.where(kept)

    def _take_jumps(self) -> Jumps:
        """Forced tokens as far as the pages of their slots reach. One position stays free: the scheduler may
        have planned the step after this one already, counting on one token a step."""
        if not self._forced:
            return NO_JUMPS
        slots, inputs, complete = list(self._forced), [], []
        for slot in slots:
            tokens = self._forced.pop(slot)
            room = int(self.num_pages[slot] * self.page_size - self.computed[slot])
            taken = max(1, min(len(tokens), room - 1))
            inputs.append(tokens[:taken])
            complete.append(taken == len(tokens))
            if taken < len(tokens):
                self._forced[slot] = tokens[taken:]
        return Jumps(slots, inputs, complete)

    def _finish_prompts(
        self, chunk_slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[chunks] whether a chunk reaches the end of its prompt, and whether that gives numbers in place of a token. These slots
        decode from the next step on, unless its plan releases them."""
        prompts = [self._prompts[slot] for slot in chunk_slots.tolist()]
        known = np.array([num_ids(admit.token_ids) for admit in prompts], dtype=np.int64)
        pooled = np.array([admit.pool is not None for admit in prompts], dtype=bool)
        ended = self.computed[chunk_slots] >= known
        self.is_decoding[chunk_slots] = ended
        return ended, pooled

    def _pooled_rows(
        self,
        chunk_slots: NDArray[np.int64],
        last_rows: NDArray[np.int32],
        gives: NDArray[np.bool_],
    ) -> list[PooledRow]:
        """The last rows of the chunks for which ``gives`` [chunks] holds."""
        pairs = zip(chunk_slots[gives].tolist(), last_rows[gives].tolist(), strict=True)
        pools = ((slot, row, self._prompts[slot].pool) for slot, row in pairs)
        return [PooledRow(slot, row, pool) for slot, row, pool in pools if pool is not None]

    def _prompt_spans(self, plan: StepPlan, first_rows: NDArray[np.int32]) -> list[PromptSpan]:
        spans = []
        for chunk, first_row in zip(plan.prefill, first_rows.tolist(), strict=True):
            admit = self._prompts[chunk.slot]
            sampling: SamplingParams = admit.sampling
            if sampling.prompt_logprobs is None:
                continue
            prompt = unpack_ids(admit.token_ids)
            prompt = prompt[: len(prompt) - admit.num_output]
            first = max(chunk.start + 1, sampling.prompt_logprobs_start)
            following = prompt[first : chunk.start + 1 + chunk.num_tokens]
            if len(following):
                row = first_row + first - (chunk.start + 1)
                spans.append(PromptSpan(chunk.slot, row, following, sampling.prompt_logprobs))
        return spans
