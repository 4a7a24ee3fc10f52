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
from radixrt.messages.images import DropImage, LoadImage
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
from radixrt.worker.drafts.head import HeadDrafter
from radixrt.worker.drafts.price import NEVER, DraftPrice, HeadTrials
from radixrt.worker.drafts.speculator import Speculator
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
        self._head = parts.head_drafter(pool, self._batch)
        self._auxiliary = parts.auxiliary_states()
        self._speculator = Speculator(
            ends,
            self.matchers.forced,
            self.matchers.allowed,
            self._head,
            from_text=config.speculation != "head",
        )
        self.draft_price = DraftPrice()
        self._head_trials = HeadTrials()
        self._tp = parts.tp
        self._deferred = DeferredRows(device)
        self._prompts = PromptOutputs(parts.model, parts.setup.device, parts.pooler)
        self._draw = fastest_draw(device.torch_device)
        self._states = states
        self.images = images
        self._expert_counts = parts.expert_counts
        self._forward = StepForward(parts, pool, graphs, states, adapters, images, self._auxiliary)
        self._in_flight: LaunchedStep | None = None
        self._order = step_order(device, self._batch, self._sampling, self.matchers)

    @property
    def kv_caches(self) -> list[LayerKV]:
        """The KV cache of each layer."""
        return self._forward.context.kv_caches

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
            case LoadImage() | DropImage():
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
        drafts, draft_s, head_s = self._propose(plan, decoding)
        inputs = self._batch.next_step(plan)
        kept_states = self._plan_states(inputs)
        self._order.before_launch(inputs, drafts)
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
        verified = self._verify(drafts, slots, kept_states)
        if self._head is not None:
            states = hidden if self._auxiliary is None else self._auxiliary.rows
            self._head.take_states(states, inputs, len(plan.prefill), self._batch.computed)
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
            draft_s=draft_s,
            head_s=head_s,
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
        self._speculator.extend(slots, token_ids)
        if self._head is not None:
            self._head.extend(slots, token_ids)
        step_s = self._order.seconds(step)
        self._learn_draft_price(step, step_s)
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
        if self._head is not None:
            self._head.catch_up(plan.release)  # their pages stay in the tree
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
        self._speculator.release(slot)
        if self._head is not None:
            self._head.release(slot)

    def _admit(self, admit: Admit) -> None:
        if self._deferred.drop(admit.slot):  # its sequence was dropped
            self._forget(admit.slot)
        token_ids = unpack_ids(admit.token_ids)
        self._batch.admit(admit)
        if self._head is not None:
            self._head.follow(admit)
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
        if not self._order.overlaps:
            self._speculator.admit(admit)
            if admit.drafts is not None and (admit.drafts.continuation or admit.drafts.prediction):
                self.draft_price.retry_soon()

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
            self._speculator.defer(deferred.tolist())
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

    # ------------------------------------------------------------ drafts

    def _propose(
        self, plan: StepPlan, decoding: NDArray[np.int64]
    ) -> tuple[dict[int, TokenIds], float, float]:
        """Draft tokens for the next step, by slot; the seconds that it took, 0 if none could pay,
        and the part of them that the head took.

        Args:
            decoding: [n] slots.
        """
        drafts: dict[int, TokenIds] = {}
        slots = self._speculator.slots_of(decoding)
        if not slots:
            return drafts, 0.0, 0.0
        if plan.prefill:
            price = self.draft_price.beside_prompts(len(decoding), plan.draft_saving)
        else:
            price = self.draft_price.next(len(decoding))
        price = float(self._tp.from_first(np.array([price]))[0])  # the ranks' times differ
        if price >= NEVER:
            return drafts, 0.0, 0.0
        begun = time.perf_counter()
        head_s = 0.0 if self._head is None else self._draft_by_head(self._head, slots, price)
        for slot in slots:
            room = self._batch.room_for_drafts(slot)
            if self._states is not None:
                room = min(room, self._states.room_for_drafts())
            if tokens := self._speculator.propose(slot, room, price):
                drafts[slot] = np.array(tokens, dtype=np.int32)
                self._batch.draft(slot, self._speculator.last_token(slot), drafts[slot])
                if self._states is not None:
                    self._states.draft(len(tokens))
        return drafts, time.perf_counter() - begun, head_s

    def _draft_by_head(self, head: HeadDrafter, slots: list[int], price: float) -> float:
        """Let the head draft for those of some slots where that pays; returns the seconds that it
        took."""
        cost = self.draft_price.of_head(len(slots))
        rooms = {slot: self._batch.room_for_drafts(slot) for slot in slots}
        lengths = {
            slot: self._speculator.length_for_head(slot, room, price, cost)
            for slot, room in rooms.items()
        }
        wanted = {slot: min(2 * n, rooms[slot]) for slot, n in lengths.items() if n}
        if self._head_trials.is_due(drafts=bool(wanted)):
            wanted = {slot: 1 for slot, room in rooms.items() if room > 0}
        begun, before = time.perf_counter(), head.computed
        head.draft(wanted, price + cost)
        seconds = time.perf_counter() - begun if wanted else 0.0
        self.draft_price.observe_head(head.computed - before, seconds)
        return seconds

    def _learn_draft_price(self, step: LaunchedStep, seconds: float) -> None:
        if self._order.overlaps:
            return
        drafted = sum(draft.num_drafted for draft in step.drafts)
        accepted = sum(draft.num_accepted for draft in step.drafts)
        if step.prompt_tokens:
            if not step.prompt_logprobs:
                tokens = step.prompt_tokens
                self.draft_price.observe_prompts(step.decoding, drafted, tokens, seconds)
            return
        has_forced = sum(step.advanced.values()) > accepted  # their rows cost less
        known_s = 0.0 if has_forced else seconds
        tokens = step.decoding + accepted
        self.draft_price.observe(step.decoding, drafted, tokens, known_s, step.draft_s, step.head_s)

    def _verify(
        self, drafts: dict[int, TokenIds], slots: NDArray[np.int64], kept_states: list[int]
    ) -> list[VerifiedDraft]:
        """Give back the positions of drafts that were not drawn.

        Args:
            slots: [rows] of the tokens that were sampled; a slot that is not among them is
                deferred.
            kept_states: of this step; those behind accepted drafts are added.
        """
        if not drafts:
            return []
        counts = np.bincount(slots, minlength=max(drafts) + 1)
        verified: list[VerifiedDraft] = []
        for slot, tokens in drafts.items():
            num_accepted = max(0, int(counts[slot]) - 1)
            num_rejected = len(tokens) - num_accepted
            self._batch.reject(slot, num_rejected)
            if self._states is not None:
                kept_states += self._states.verified(slot, num_rejected)
            if counts[slot]:
                verified += self._speculator.verified(slot, len(tokens), num_accepted)
        return verified

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
