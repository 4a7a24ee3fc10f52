"""The worker's persistent batch: step plans change it, forward passes read it.

A plan holds only changes. The other inputs of a forward pass (block tables, lengths, the tokens
sampled last) stay here between steps. The sampled tokens stay on the device, so a decode step needs
nothing from the scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.metadata import AttentionMetadata, PrefixGroups
from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import Device
from radixrt.messages.adapters import NO_ADAPTER
from radixrt.messages.ids import TokenIds, num_ids, unpack_ids
from radixrt.messages.requests import PoolingRequest
from radixrt.messages.steps import Admit, StepPlan
from radixrt.worker.drafts.verification import NO_DRAFT
from radixrt.worker.image_positions import ImagePart, image_parts, positions_less
from radixrt.worker.kv.ragged import PrefixFinder, RaggedStep


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive prompt positions for whose next tokens a request asks log-probabilities."""

    slot: int
    first_row: int
    """Index into the flat batch."""
    next_tokens: TokenIds
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The end of a prompt that gives numbers in place of a token."""

    slot: int
    row: int
    """Index into the flat batch."""
    pool: PoolingRequest


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass: decode rows first, then runs and prefill chunks. A slot has one sampling
    row, and another one for each token of its draft."""

    token_ids: torch.Tensor  # [num_tokens] int64, on the device
    positions: torch.Tensor  # [num_tokens] int64, by which queries and keys rotate, on the device
    attention: AttentionMetadata
    graph_rows: int | None
    """Rows of the captured graph that computes this step: first those that sample, then padding.
    None: no graph does."""
    sampling_slots: NDArray[np.int64]  # [rows] slots that sample a token
    sampling_slots_on_device: torch.Tensor  # [rows] int64
    sampling_rows: torch.Tensor  # [rows] int64 into the flat batch, on the device
    sampling_positions: torch.Tensor  # [rows] int64, of the sampled tokens in their sequences
    pooled: list[PooledRow]
    drafted: (
        NDArray[np.int64] | None
    )  # [rows] draft token behind each row, NO_DRAFT behind the last of a slot; None: no drafts
    prompt_spans: list[PromptSpan]
    runs: "Runs"
    slots: NDArray[np.int64]  # [sequences] of the flat batch
    starts: NDArray[np.int64]  # [sequences] positions of their first tokens
    adapters: (
        torch.Tensor | None
    )  # [num_tokens] int64 on the device, the place of each row's adapter; None: no row has one
    images: list[ImagePart]


@dataclass(frozen=True, slots=True)
class Runs:
    """Slots that compute several tokens in one step: known ones, which a grammar forces, and drafts
    behind them."""

    slots: list[int]
    token_ids: list[TokenIds]
    """Inputs of this step."""
    complete: list[bool]
    """All forced tokens are computed: the slot samples again."""
    num_drafts: list[int]
    """Inputs, at the end, that are drafts."""

    @property
    def beyond(self) -> list[int]:
        """Known tokens by which each slot advances beyond the one of a plain decode step."""
        each = zip(self.token_ids, self.num_drafts, strict=True)
        return [len(tokens) - 1 - drafts for tokens, drafts in each]


NO_RUNS = Runs([], [], [], [])
NO_TOKENS = np.empty(0, dtype=np.int32)
NO_SLOTS = np.empty(0, dtype=np.int64)


SequenceRows = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]
"""Slots, rows of the flat batch, and positions of the tokens after these rows."""


def with_draft_rows(sampling: SequenceRows, runs: Runs) -> tuple[SequenceRows, NDArray[np.int64]]:
    """The rows that sample when each draft token has one too.

    Slot 4 computes one token, and slot 7 verifies the drafts 5 and 6 behind its token 9, at
    positions 20 to 22:

    >>> runs = Runs([4, 7], [np.array([8]), np.array([9, 5, 6])], [True, True], [0, 2])
    >>> last = np.array([4, 7]), np.array([0, 3], np.int32), np.array([10, 23])
    >>> (slots, rows, positions), drafted = with_draft_rows(last, runs)
    >>> slots.tolist(), rows.tolist(), positions.tolist(), drafted.tolist()
    ([4, 7, 7, 7], [0, 1, 2, 3], [10, 21, 22, 23], [-1, 5, 6, -1])

    Args:
        sampling: of the sequences that sample: the complete runs, then prompts.

    Returns:
        the rows, and for each the draft behind it.
    """
    slots, last_rows, positions = sampling
    drafts = [
        tokens[len(tokens) - count :]
        for tokens, count, complete in zip(
            runs.token_ids, runs.num_drafts, runs.complete, strict=True
        )
        if complete
    ]
    counts = np.ones(len(slots), dtype=np.int64)
    counts[: len(drafts)] += [len(tokens) for tokens in drafts]
    ends = np.cumsum(counts)
    from_last = np.arange(ends[-1]) - np.repeat(ends - 1, counts)
    drafted = np.full(ends[-1], NO_DRAFT, dtype=np.int64)
    drafted[np.flatnonzero(from_last)] = np.concatenate(drafts)
    rows = np.repeat(last_rows, counts) + from_last.astype(np.int32)
    return (np.repeat(slots, counts), rows, np.repeat(positions, counts) + from_last), drafted


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
        num_adapters: int = 0,
        whole_images: bool = False,
    ) -> None:
        """
        Args:
            num_adapters: places of LoRA adapters; this number stands for none in ``adapters``.
            spare_page: page that padding writes to; no sequence has it.
            graph_rows: from the rows of a decode step to those that it is padded to, or None where
                it is not padded; None: no step is padded.
            whole_images: the tokens of an image see one another in both directions.
        """
        self._whole_images = whole_images
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
        self._num_adapters = num_adapters
        self.adapters = np.full(max_slots, num_adapters, dtype=np.int64)
        """The place of each slot's adapter."""
        self.adapter_from = np.zeros(max_slots, dtype=np.int64)
        """The first position at which it works."""
        self._less = np.zeros(max_slots, dtype=np.int64)
        """Positions by which text behind a slot's images is nearer than its tokens are."""
        self._prefixes = PrefixFinder()
        self._prompts: dict[int, Admit] = {}
        self._forced: dict[int, TokenIds] = {}
        """Inputs of slots whose next tokens are known: the sampled one, and those forced after
        it."""
        self._drafts: dict[int, TokenIds] = {}
        """Inputs of the next step behind the known ones."""

    # ------------------------------------------------------------ changes by a plan

    def release(self, slot: int) -> None:
        self.is_decoding[slot] = False
        self._less[slot] = 0
        self._prompts.pop(slot, None)
        self._forced.pop(slot, None)
        self._drafts.pop(slot, None)

    def admit(self, admit: Admit) -> None:
        slot = admit.slot
        self._prompts[slot] = admit
        self.adapters[slot] = self._num_adapters if admit.adapter == NO_ADAPTER else admit.adapter
        self.adapter_from[slot] = admit.adapter_from
        self._less[slot] = sum(run.positions_less for run in admit.images)
        self.computed[slot] = admit.num_cached
        self.is_decoding[slot] = False
        self.set_block_table(slot, unpack_ids(admit.pages))

    def set_block_table(self, slot: int, pages: NDArray[np.int32]) -> None:
        self._prefixes.forget()
        self.block_tables[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)

    def extend(self, slots: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """Append page ``pages[i]`` to the block table of ``slots[i]``; a slot's entries are
        adjacent."""
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        rank = np.arange(len(slots)) - np.repeat(starts, np.diff(starts, append=len(slots)))
        self.block_tables[slots, self.num_pages[slots] + rank] = pages
        np.add.at(self.num_pages, slots, 1)

    # ------------------------------------------------------------ a step

    def next_step(self, plan: StepPlan) -> StepInputs:
        """The forward pass of a plan whose changes have been applied; advances the slots."""
        runs = self._take_runs()
        if any(runs.num_drafts):
            decoding = NO_SLOTS
            runs, groups = self._all_as_runs(runs)
        else:
            decoding, groups = self._group_decoding(runs.slots)
        chunk_slots = np.array([chunk.slot for chunk in plan.prefill], dtype=np.int64)
        self.computed[chunk_slots] = [chunk.start for chunk in plan.prefill]
        chunk_lengths = [chunk.num_tokens for chunk in plan.prefill]
        many_lengths = np.array([*map(len, runs.token_ids), *chunk_lengths], dtype=np.int64)
        slots = np.concatenate((decoding, np.array(runs.slots, dtype=np.int64), chunk_slots))
        lengths = np.concatenate((np.ones(len(decoding), dtype=np.int64), many_lengths))
        starts = self.computed[slots]
        self.computed[slots] = starts + lengths
        ended, pooled = self._finish_prompts(chunk_slots)
        samples = np.concatenate(
            (
                np.ones(len(decoding), dtype=bool),
                np.array(runs.complete, dtype=bool),
                ended & ~pooled,
            )
        )
        prompt_tokens = [unpack_ids(self._prompts[c.slot].token_ids)[c.start : c.start + c.num_tokens]
                         for c in plan.prefill]  # fmt: skip
        step = RaggedStep.for_slots(self.block_tables, self.page_size, slots, lengths, starts)
        chunk_rows = step.qo_indptr[len(decoding) + len(runs.slots) :]
        sampling = slots[samples], step.qo_indptr[1:][samples] - 1, self.computed[slots][samples]
        inputs = self._inputs(
            step,
            decoding,
            groups,
            [*runs.token_ids, *prompt_tokens],
            sampling,
            self._pooled_rows(chunk_slots, chunk_rows[1:] - 1, ended & pooled),
            self._prompt_spans(plan, chunk_rows[:-1]),
            runs,
            (slots, starts),
            self._image_parts(plan, chunk_rows[:-1]),
        )
        if not self._less.any():
            return inputs
        less = np.repeat(self._less[slots], lengths)
        for chunk, row in zip(plan.prefill, chunk_rows.tolist(), strict=False):
            rows = slice(row, row + chunk.num_tokens)
            less[rows] = positions_less(self._prompts[chunk.slot].images, step.positions[rows])
        (positions,) = self._device.upload(step.positions - less)
        return replace(inputs, positions=positions)

    def _inputs(
        self,
        step: RaggedStep,
        decoding: NDArray[np.int64],
        groups: PrefixGroups,
        known_tokens: list[TokenIds],
        sampling: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]],
        pooled: list[PooledRow],
        prompt_spans: list[PromptSpan],
        runs: Runs,
        sequences: tuple[NDArray[np.int64], NDArray[np.int64]],
        images: list[ImagePart],
    ) -> StepInputs:
        """The inputs of a step, sent to the device in one transfer.

        Args:
            decoding: slots of the first rows, which decode.
            groups: of the first sequences.
            known_tokens: inputs of the other rows.
            sampling: of the sequences that sample, each [sequences]: slots, their last rows of the
                flat batch, and positions of the tokens after these.
            sequences: slots of all, and the positions of their first tokens.
        """
        drafted = None
        if any(runs.num_drafts):
            sampling, drafted = with_draft_rows(sampling, runs)
        sampling_slots, sampling_rows, sampling_positions = sampling
        adapters = self._adapters_of_rows(sequences[0], step)
        graph_rows = None
        if self._graph_rows is not None and not known_tokens and adapters is None:
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
            attention=step.metadata(
                kv_indices,
                kv_locations,
                self._device,
                groups,
                tuple((one.row, one.num_tokens) for one in images) if self._whole_images else (),
            ),
            graph_rows=graph_rows,
            sampling_slots=sampling_slots,
            sampling_slots_on_device=slots,
            sampling_rows=rows,
            sampling_positions=places,
            pooled=pooled,
            drafted=drafted,
            prompt_spans=prompt_spans,
            runs=runs,
            slots=sequences[0],
            starts=sequences[1],
            adapters=adapters,
            images=images,
        )

    def _adapters_of_rows(self, slots: NDArray[np.int64], step: RaggedStep) -> torch.Tensor | None:
        """The place of each row's adapter [num_tokens] int64; None: no row has one."""
        if (self.adapters[slots] == self._num_adapters).all():
            return None
        lengths = np.diff(step.qo_indptr)[: len(slots)]
        places = np.repeat(self.adapters[slots], lengths)
        works = step.positions >= np.repeat(self.adapter_from[slots], lengths)
        places = np.where(works, places, self._num_adapters)
        return self._device.upload(places)[0] if (places != self._num_adapters).any() else None

    def record(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the sampled ``tokens`` of ``slots``, both [rows] on the device, as the next
        inputs."""
        self.last_tokens[slots] = tokens

    def defer(self, slots: NDArray[np.int64]) -> None:
        """Compute nothing of ``slots`` [n], whose tokens are not sampled yet."""
        self.is_decoding[slots] = False

    def resume(self, slots: NDArray[np.int64]) -> None:
        """Go on with ``slots`` [n], whose tokens are sampled now."""
        self.is_decoding[slots] = True

    def force(self, slot: int, token_ids: TokenIds) -> None:
        """Let the next inputs of a decoding slot be its sampled token and those forced after it."""
        self._forced[slot] = token_ids

    def room_for_drafts(self, slot: int) -> int:
        """Draft tokens for which a decoding slot has pages. One position stays free, as for forced
        tokens."""
        known = len(self._forced.get(slot, (None,)))
        return int(self.num_pages[slot] * self.page_size - self.computed[slot]) - known - 1

    def draft(self, slot: int, last_token: int, token_ids: TokenIds) -> None:
        """Let the next step compute these draft tokens behind the known ones, the last of which is
        ``last_token``."""
        self._forced.setdefault(slot, np.array([last_token], dtype=np.int32))
        self._drafts[slot] = token_ids

    def reject(self, slot: int, num_tokens: int) -> None:
        """Give back the positions of the last draft tokens of a slot. The next tokens are written
        over them."""
        self.computed[slot] -= num_tokens

    def _all_as_runs(self, runs: Runs) -> tuple[Runs, PrefixGroups]:
        """The runs, and the other decoding slots as runs of one token, in the order of their
        groups. So slots with drafts read a shared prefix with the others. The host reads the
        tokens, so this is for devices whose steps do not overlap."""
        slots, groups = self._group_decoding([])
        given = {
            slot: (tokens, complete, drafts)
            for slot, tokens, complete, drafts in zip(
                runs.slots, runs.token_ids, runs.complete, runs.num_drafts, strict=True
            )
        }
        last = self.last_tokens.numpy().astype(np.int32)
        each = [given.get(slot, (last[slot : slot + 1], True, 0)) for slot in slots.tolist()]
        token_ids, complete, num_drafts = (list(column) for column in zip(*each, strict=True))
        return Runs(slots.tolist(), token_ids, complete, num_drafts), groups

    def _group_decoding(self, running: list[int]) -> tuple[NDArray[np.int64], PrefixGroups]:
        """The slots that advance by one token, those that share a prefix side by side, and their
        groups."""
        decoding = np.flatnonzero(self.is_decoding)
        whole_pages = self.computed[decoding] // self.page_size
        slots, groups = self._prefixes.group(decoding, self.block_tables, whole_pages)
        if not running:
            return slots, groups
        kept = ~np.isin(slots, running)
        return slots[kept], groups.where(kept)

    def _take_runs(self) -> Runs:
        """Forced tokens as far as the pages of their slots reach, and drafts. One position stays
        free: the scheduler may have planned the step after this one already, counting on one token
        a step."""
        if not self._forced:
            return NO_RUNS
        slots, inputs, complete, num_drafts = list(self._forced), [], [], []
        for slot in slots:
            tokens = self._forced.pop(slot)
            room = int(self.num_pages[slot] * self.page_size - self.computed[slot])
            taken = max(1, min(len(tokens), room - 1))
            drafts = self._drafts.pop(slot, NO_TOKENS)
            inputs.append(np.concatenate((tokens[:taken], drafts)))
            complete.append(taken == len(tokens))
            num_drafts.append(len(drafts))
            if taken < len(tokens):
                self._forced[slot] = tokens[taken:]
        return Runs(slots, inputs, complete, num_drafts)

    def _finish_prompts(
        self, chunk_slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[chunks] whether a chunk reaches the end of its prompt, and whether that gives numbers
        in place of a token. These slots decode from the next step on, unless its plan releases
        them."""
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

    def _image_parts(self, plan: StepPlan, first_rows: NDArray[np.int32]) -> list[ImagePart]:
        """The placeholders among the chunks of a step."""
        parts: list[ImagePart] = []
        for chunk, row in zip(plan.prefill, first_rows.tolist(), strict=True):
            images = self._prompts[chunk.slot].images
            parts += image_parts(images, chunk.start, chunk.num_tokens, row)
        return parts

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
