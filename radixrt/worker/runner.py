"""One step on the worker: apply the plan, run the model, sample."""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.backend import AttentionBackend, ForwardContext
from radixrt.messages import (
    GRAMMAR_FAILED,
    Admit,
    LogprobRow,
    StepPlan,
    StepResult,
    TokenIds,
    pack_ids,
    unpack_ids,
)
from radixrt.models.decoder import CausalLM
from radixrt.worker.batch import PersistentBatch, PromptSpan, StepInputs
from radixrt.worker.grammars import GrammarState
from radixrt.worker.kv_pool import KVPool
from radixrt.worker.logprobs import prompt_logprob_rows
from radixrt.worker.sampler import sample
from radixrt.worker.sampling_state import SamplingState

PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits are in memory at once: 256 rows of a 128k vocabulary are 128 MiB."""

NO_TOKENS = np.empty(0, dtype=np.int32)


class ModelRunner:
    """Holds the model, its KV pool and the persistent batch; executes step plans in order."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        pool: KVPool,
        batch: PersistentBatch,
        sampling: SamplingState,
        grammars: GrammarState,
    ) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._sampling = sampling
        self.grammars = grammars
        self._context = ForwardContext(backend, pool.key_caches, pool.value_caches)

    @torch.inference_mode()
    def step(self, plan: StepPlan, waited_s: float = 0.0) -> StepResult:
        """Execute one plan, for which the worker has waited ``waited_s``."""
        begin = time.perf_counter()
        self._apply(plan)
        inputs = self._batch.next_step(plan)
        before_forward = time.perf_counter()
        hidden, logits = self._forward(inputs)
        after_forward = time.perf_counter()
        slots, token_ids, logprobs = self._sample(inputs, logits)
        return StepResult(
            step_id=plan.step_id,
            slots=pack_ids(slots),
            token_ids=pack_ids(token_ids),
            jump_slots=pack_ids(inputs.jumps.slots),
            jump_tokens=pack_ids(inputs.jumps.beyond),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(inputs.prompt_spans, hidden),
            forward_s=after_forward - before_forward,
            wait_s=waited_s,
            step_s=time.perf_counter() - begin,
        )

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.release:
            self._batch.release(slot)
            self._sampling.release(slot)
            self.grammars.release(slot)
        for admit in plan.admit:
            self._admit(admit)
        for table in plan.block_tables:
            self._batch.set_block_table(table.slot, unpack_ids(table.pages))
        if plan.extend_slots:
            self._batch.extend(unpack_ids(plan.extend_slots), unpack_ids(plan.extend_pages))

    def _admit(self, admit: Admit) -> None:
        token_ids = unpack_ids(admit.token_ids)
        self._batch.admit(admit)
        self._sampling.admit(admit.slot, admit.sampling, token_ids, admit.num_output)
        if admit.grammar is not None:
            output = token_ids[len(token_ids) - admit.num_output :]
            may_jump = admit.sampling.logprobs is None  # a forced token has no logits
            self.grammars.admit(admit.slot, admit.grammar, output, may_jump=may_jump)

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [num_tokens, hidden_size], and logits [rows, vocab] of the rows that sample."""
        self._backend.plan(inputs.attention)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._context)
        return hidden, self._model.logits(hidden[inputs.sampling_rows])

    def _sample(
        self, inputs: StepInputs, logits: torch.Tensor
    ) -> tuple[NDArray[np.int64], TokenIds, list[LogprobRow]]:
        """Slots and their new tokens, and the log-probabilities asked for."""
        slots = inputs.sampling_slots
        if not len(slots):
            return slots, NO_TOKENS, []
        mask = self.grammars.mask(slots)
        sampled = sample(self._sampling, logits, slots, inputs.sampling_positions, mask)
        self._batch.record(slots, sampled.token_ids)
        token_ids, logprobs = sampled.to_host()
        after = self.grammars.advance(slots, token_ids)
        token_ids[np.isin(slots, after.failed)] = GRAMMAR_FAILED
        if after.forced:
            slots, token_ids = self._jump(slots, token_ids, after.forced)
        return slots, token_ids, logprobs

    def _jump(
        self, slots: NDArray[np.int64], token_ids: TokenIds, forced: dict[int, list[int]]
    ) -> tuple[NDArray[np.int64], TokenIds]:
        """Let the next step compute what the grammars force. Returns all new tokens, with their slots."""
        new_tokens = [
            np.array([token, *forced.get(slot, ())], dtype=np.int32)
            for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True)
        ]
        for slot, tokens in zip(slots.tolist(), new_tokens, strict=True):
            if len(tokens) > 1:
                self._batch.force(slot, tokens)
                self._sampling.count(slot, tokens[1:].tolist())
        return np.repeat(slots, [len(tokens) for tokens in new_tokens]), np.concatenate(new_tokens)

    def _prompt_logprobs(self, spans: list[PromptSpan], hidden: torch.Tensor) -> list[LogprobRow]:
        rows: list[LogprobRow] = []
        for span in spans:
            next_tokens = torch.from_numpy(span.next_tokens.copy()).to(hidden.device)
            for start in range(0, len(next_tokens), PROMPT_LOGITS_ROWS):
                part = next_tokens[start : start + PROMPT_LOGITS_ROWS]
                first = span.first_row + start
                logits = self._model.logits(hidden[first : first + len(part)])
                rows += prompt_logprob_rows(logits, part, span.slot, span.num_top)
        return rows
