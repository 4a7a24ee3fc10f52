"""Executes a step on the worker: applies the plan, runs the model, samples.

On a GPU, steps overlap. A step's forward pass is launched before the tokens of the step ahead of it
are on the host: its inputs are on the device. While it is computed, those tokens arrive, the
matchers take them and fill this step's mask; then its sampling is launched, and the next plan is
taken up. The host is one step behind the device and never waits for kernels that it has just
launched. On a CPU a step is over when it returns.

A row whose mask is not ready in time is *deferred*: its logits are kept, the next steps compute
nothing of its slot, and the first for which the mask is ready samples the token.
"""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.kv_spec import LayerKV
from radixrt.messages.adapters import LoadAdapter, PutAdapter
from radixrt.messages.grammars import DropGrammar, LoadGrammar
from radixrt.messages.ids import TokenIds, pack_ids, unpack_ids
from radixrt.messages.images import DropImage, HurryImage, LoadImage
from radixrt.messages.links import WorkerOrder
from radixrt.messages.steps import (
    GRAMMAR_FAILED,
    Admit,
    ExpertTokens,
    StepPlan,
    StepResult,
    VerifiedDraft,
)
from radixrt.worker.adapters import AdapterLoader
from radixrt.worker.batch import (
    NO_SLOTS,
    PersistentBatch,
    Runs,
    StepInputs,
)
from radixrt.worker.drafts.step_drafts import StepDrafts
from radixrt.worker.images import ImageFeatures
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.kv.states import SlotStates
from radixrt.worker.launched_step import LaunchedStep, step_order
from radixrt.worker.prompt_outputs import PromptOutputs
from radixrt.worker.replays import DecodeGraphs
from radixrt.worker.runner_parts import RunnerParts
from radixrt.worker.sampling.deferred_rows import DeferredRows, SamplingRows
from radixrt.worker.sampling.matchers import SlotMatchers
from radixrt.worker.sampling.sampler import SampledTokens, fastest_draw, sample
from radixrt.worker.sampling.state import SamplingState
from radixrt.worker.step_forward import StepForward


class ModelRunner:
    """Holds the model, its KV pool and the persistent batch; executes step plans in order."""

    def __init__(
        self,
        parts: RunnerParts,
        pool: KVPool,
        graphs: DecodeGraphs | None = None,
        states: SlotStates | None = None,
        adapters: AdapterLoader | None = None,
        images: ImageFeatures | None = None,
    ) -> None:
        """
        Args:
            adapters: None: there are none.
            states: of recurrent layers; None: the model has none.
            images: None: the model sees none.
            graphs: captured on the same ``pool``; None: every step is launched kernel by kernel.
        """
        config, device, vocab_size = parts.config, parts.setup.device, parts.model.vocab_size
        slots, ends = parts.setup.max_rows, parts.eos_token_ids
        self._model = parts.model
        self._device = device
        self._batch = PersistentBatch(
            slots,
            parts.setup.max_pages,
            config.page_size,
            device,
            spare_page=pool.spare_page,
            graph_rows=None if graphs is None else graphs.rows_for,
            num_adapters=0 if adapters is None else adapters.adapters.num_adapters,
            whole_images=images is not None and images.whole,
        )
        self._adapters = adapters
        self._sampling = SamplingState(slots, vocab_size, eos_token_ids=ends, device=device)
        jumps = not config.debug_disable_jump_forward
        self.matchers = SlotMatchers(
            parts.loader,
            vocab_size,
            eos_token_ids=ends,
            jump_forward=jumps,
            decide=parts.tp.from_first,
        )
        self._deferred = DeferredRows(device)
        self._prompts = PromptOutputs(parts.model, parts.setup.device, parts.pooler)
        self._draw = fastest_draw(device.torch_device)
        self._states = states
        self.images = images
        self._expert_counts = parts.expert_counts
        self._order = step_order(device, self._batch, self._sampling, self.matchers)
        self.drafts = StepDrafts(
            parts, pool, self._batch, states, self.matchers, overlaps=self._order.overlaps
        )
        self._forward = StepForward(
            parts, pool, graphs, states, adapters, images, self.drafts.auxiliary
        )
        self._in_flight: LaunchedStep | None = None

    @property
    def kv_caches(self) -> list[LayerKV]:
        """The KV cache of each layer."""
        return self._forward.context.kv_caches

    @property
    def kept_states(self) -> list[torch.Tensor]:
        """The tables of the states that are kept; none: no layer is recurrent."""
        return [] if self._states is None else self._states.kept

    @property
    def in_flight(self) -> LaunchedStep | None:
        """The step that was launched and is not collected."""
        return self._in_flight

    def order(self, message: WorkerOrder) -> None:
        """Begin to load a grammar, an image or an adapter, drop one, or let layers have an
        adapter."""
        match message:
            case LoadGrammar() | DropGrammar():
                self.matchers.loader.order(message)
            case LoadImage() | HurryImage() | DropImage():
                assert self.images is not None, "an image for a model that sees none"
                self.images.order(message)
            case LoadAdapter():
                assert self._adapters is not None, "the scheduler knows whether there are places"
                self._adapters.load(message)
            case PutAdapter():
                assert self._adapters is not None, "the scheduler knows whether there are places"
                if self._adapters.put():
                    self._forward.forget_adapters()

    def seconds_loading(self) -> float:
        """Time for which the slowest of the grammars has been loading; 0: none is."""
        return self.matchers.loader.seconds_at_work()

    def expert_tokens(self) -> ExpertTokens | None:
        """The tokens of each expert so far; None: they are not counted."""
        if (counts := self._expert_counts) is None:
            return None
        return ExpertTokens(layers=len(counts), counts=counts.numpy().tobytes())

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def step(self, plan: StepPlan, waited_s: float = 0.0) -> list[StepResult]:
        """Launch one plan, for which the worker has waited ``waited_s``.

        Returns:
            The result of the step ahead of it, where steps overlap; else its own.
        """
        begun = time.perf_counter()
        self._apply(plan)
        decoding = np.flatnonzero(self._batch.is_decoding)
        drafts = self.drafts.propose(plan, decoding)
        inputs = self._batch.next_step(plan)
        kept_states = self._plan_states(inputs)
        self._order.before_launch(inputs, drafts.tokens)
        launched = self._device.record_event()
        hidden, logits = self._forward.run(inputs)
        computed = self._device.record_event()
        results = self.collect()  # while the device computes
        forced = self._order.force_ahead(inputs)
        rows, deferred = self._rows_to_sample(inputs, logits, alone=not plan.prefill)
        slots = rows.slots
        sampled = self._sample(rows)
        if sampled is not None and sampled.kept is not None:
            slots = rows.slots[sampled.kept]
        verified = self.drafts.verify(drafts.tokens, slots, kept_states)
        self.drafts.take_states(hidden, inputs, len(plan.prefill))
        prompt_logprobs = self._prompts.logprobs(inputs.prompt_spans, hidden)
        vectors = self._prompts.vectors(inputs.pooled, hidden)
        tensors = [] if vectors is None else [vectors.values]
        tensors += [] if sampled is None else sampled.tensors()
        tensors += [t for part in prompt_logprobs for t in (part.token_ids, part.logprobs)]
        # Before the download: once that has arrived, everything before this event is done.
        sampled_all = self._device.record_event()
        self._in_flight = LaunchedStep(
            step_id=plan.step_id,
            decoding=len(decoding),
            draft_s=drafts.seconds,
            head_s=drafts.head_s,
            prompt_tokens=sum(chunk.num_tokens for chunk in plan.prefill),
            slots=slots,
            deferred=deferred,
            advanced=self._advanced(inputs.runs, verified),
            drafts=verified,
            sampled=sampled,
            prompt_logprobs=prompt_logprobs,
            vectors=vectors,
            download=self._device.download(tensors),
            launched=launched,
            computed=computed,
            sampled_all=sampled_all,
            waited_s=waited_s,
            begun=begun,
            forced=forced,
            failed=self.matchers.failed(slots),
            kept_states=kept_states,
            released=self._release_retired(slots),
        )
        return results if self._order.overlaps else self.collect()

    def collect(self) -> list[StepResult]:
        """Wait for the step in flight. Returns its result, or nothing if there is none."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        token_ids, logprobs, prompt_logprobs, vectors = step.read()
        slots, token_ids = self._advance_matchers(step, token_ids)
        self.drafts.extend(slots, token_ids)
        step_s = self._order.seconds(step)
        self.drafts.learn(step, step_s)
        return [
            StepResult(
                step_id=step.step_id,
                slots=pack_ids(slots),
                token_ids=pack_ids(token_ids),
                jump_slots=pack_ids(list(step.advanced)),
                jump_tokens=pack_ids(list(step.advanced.values())),
                drafts=step.drafts,
                deferred_slots=pack_ids(step.deferred),
                kept_states=pack_ids(step.kept_states),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                vectors=vectors,
                forward_s=step.computed.seconds_since(step.launched),
                wait_s=step.waited_s,
                step_s=step_s,
            )
        ]

    # ------------------------------------------------------------ changes by a plan

    def _apply(self, plan: StepPlan) -> None:
        self.drafts.before_release(plan.release)
        for slot in plan.release:
            self._batch.release(slot)
            if self._states is not None:
                self._states.release(slot)
            if self._deferred.retire(slot):
                continue  # the last token may be the one that it waits for
            self._forget(slot)
            if self._in_flight is not None:
                self._in_flight.released.add(slot)
        for admit in plan.admit:
            self._admit(admit)
        for table in plan.block_tables:
            self._batch.set_block_table(table.slot, unpack_ids(table.pages))
        if plan.extend_slots:
            self._batch.extend(unpack_ids(plan.extend_slots), unpack_ids(plan.extend_pages))
        if self._states is not None:
            self._states.apply(plan)

    def _forget(self, slot: int) -> None:
        self._sampling.release(slot)
        self.matchers.release(slot)
        self.drafts.release(slot)

    def _admit(self, admit: Admit) -> None:
        if self._deferred.drop(admit.slot):  # its sequence was dropped
            self._forget(admit.slot)
        token_ids = unpack_ids(admit.token_ids)
        self._batch.admit(admit)
        self._sampling.admit(admit.slot, admit.sampling, token_ids, admit.num_output)
        output = token_ids[len(token_ids) - admit.num_output :]
        if admit.grammar is not None:
            # A forced token has no logits, and would not be checked against the request's own
            # lists.
            sampling = admit.sampling
            wants_logits = sampling.logprobs is not None or sampling.kept_mass
            may_jump = not wants_logits and not sampling.restricts_tokens
            self.matchers.admit(admit.slot, admit.grammar, output, may_jump=may_jump)
        self.matchers.restrict(admit.slot, admit.sampling, output)
        self.drafts.admit(admit)

    # ------------------------------------------------------------ on the device

    def _plan_states(self, inputs: StepInputs) -> list[int]:
        """Prepare the states for a step; returns the kept ones that it writes."""
        if self._states is None:
            return []
        indptr = inputs.attention.qo_indptr_cpu.numpy()
        drafts = dict(zip(inputs.runs.slots, inputs.runs.num_drafts, strict=True))
        drafts = {slot: count for slot, count in drafts.items() if count}
        return self._states.plan(inputs.slots, inputs.starts, indptr, drafts)

    def _rows_to_sample(
        self, inputs: StepInputs, logits: torch.Tensor, *, alone: bool
    ) -> tuple[SamplingRows, NDArray[np.int64]]:
        """The rows that are sampled in this step, and the slots of those that are deferred.

        Args:
            alone: the step does nothing but sample.
        """
        slots = inputs.sampling_slots
        rows = self._deferred.join(
            SamplingRows(
                slots,
                inputs.sampling_slots_on_device,
                inputs.sampling_positions,
                logits,
                inputs.drafted,
            )
        )
        ready = self.matchers.rows_ready(rows.slots, alone=alone and all(inputs.runs.complete))
        was_deferred, deferred = rows.slots[len(slots) :], NO_SLOTS
        if ready is not None:
            was_deferred, deferred = (
                was_deferred[ready[len(slots) :]],
                rows.slots[~ready & rows.first],
            )
            self._batch.defer(deferred)
            self.drafts.defer(deferred.tolist())
        self._batch.resume(was_deferred)
        return self._deferred.keep(rows, ready), deferred

    def _sample(self, rows: SamplingRows) -> SampledTokens | None:
        """One token for each row, which also becomes its slot's next input."""
        if not len(rows.slots):
            return None
        mask = self.matchers.mask(rows.slots, rows.drafted)
        sampled = sample(
            self._sampling,
            rows.logits,
            rows.slots,
            rows.positions,
            mask,
            self._draw,
            rows.drafted,
        )
        if sampled.kept is None:
            self._batch.record(rows.slots_on_device, sampled.token_ids)
            return sampled
        slots = rows.slots_on_device[sampled.kept]
        is_last = torch.ones(len(slots), dtype=torch.bool)
        is_last[:-1] = slots[1:] != slots[:-1]
        self._batch.record(slots[is_last], sampled.token_ids[is_last])
        return sampled

    def _release_retired(self, slots: NDArray[np.int64]) -> set[int]:
        """Release those of ``slots`` that have waited for their last tokens, which are sampled
        now."""
        retired = self._deferred.take_retired(slots)
        for slot in retired:
            self._batch.release(slot)
            self._forget(slot)
        return set(retired)

    @staticmethod
    def _advanced(runs: Runs, verified: list[VerifiedDraft]) -> dict[int, int]:
        """Tokens beyond the one of a plain decode step, by slot."""
        advanced = dict(zip(runs.slots, runs.beyond, strict=True))
        for draft in verified:
            advanced[draft.slot] += draft.num_accepted
        return {slot: num_tokens for slot, num_tokens in advanced.items() if num_tokens}

    # ------------------------------------------------------------ grammars and jumps

    def _advance_matchers(
        self, step: LaunchedStep, token_ids: TokenIds
    ) -> tuple[NDArray[np.int64], TokenIds]:
        """Let the matchers take a step's tokens [rows]. Returns all new tokens, with their
        slots."""
        slots = step.slots
        if not step.forced and not step.failed and not self.matchers.holds_any:
            return slots, token_ids
        to_take = np.flatnonzero(~np.isin(slots, [*step.forced, *step.released]))
        failed = self.matchers.advance(slots[to_take], token_ids[to_take])
        token_ids[to_take[failed]] = GRAMMAR_FAILED
        token_ids[np.isin(slots, list(step.failed))] = GRAMMAR_FAILED
        forced = self._order.force_after(step, slots, token_ids)
        if not forced:
            return slots, token_ids
        is_last = np.append(slots[1:] != slots[:-1], True)
        new_tokens = [
            [token, *(forced.get(slot, ()) if ends and token >= 0 else ())]
            for slot, token, ends in zip(
                slots.tolist(), token_ids.tolist(), is_last.tolist(), strict=True
            )
        ]
        lengths = [len(tokens) for tokens in new_tokens]
        return np.repeat(slots, lengths), np.concatenate(new_tokens).astype(np.int32)
