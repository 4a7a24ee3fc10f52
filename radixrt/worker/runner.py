"""One step on the worker: apply the plan, run the model, sample."""

import time

import torch

from radixrt.attention.backend import AttentionBackend, ForwardContext
from radixrt.messages import LogprobRow, StepPlan, StepResult, pack_ids, unpack_ids
from radixrt.models.decoder import CausalLM
from radixrt.worker.batch import PersistentBatch, PromptSpan, StepInputs
from radixrt.worker.kv_pool import KVPool
from radixrt.worker.logprobs import prompt_logprob_rows
from radixrt.worker.sampler import sample
from radixrt.worker.sampling_state import SamplingState

PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits are in memory at once: 256 rows of a 128k vocabulary are 128 MiB."""


class ModelRunner:
    """Holds the model, its KV pool and the persistent batch; executes step plans in order."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        pool: KVPool,
        batch: PersistentBatch,
        sampling: SamplingState,
    ) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._sampling = sampling
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
        token_ids, logprobs = self._sample(inputs, logits)
        return StepResult(
            step_id=plan.step_id,
            slots=pack_ids(inputs.sampling_slots),
            token_ids=token_ids,
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
        for admit in plan.admit:
            self._batch.admit(admit)
            self._sampling.admit(
                admit.slot, admit.sampling, unpack_ids(admit.token_ids), admit.num_output
            )
        for table in plan.block_tables:
            self._batch.set_block_table(table.slot, unpack_ids(table.pages))
        if plan.extend_slots:
            self._batch.extend(unpack_ids(plan.extend_slots), unpack_ids(plan.extend_pages))

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [num_tokens, hidden_size], and logits [rows, vocab] of the rows that sample."""
        self._backend.plan(inputs.attention)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._context)
        return hidden, self._model.logits(hidden[inputs.sampling_rows])

    def _sample(self, inputs: StepInputs, logits: torch.Tensor) -> tuple[bytes, list[LogprobRow]]:
        if not len(inputs.sampling_slots):
            return b"", []
        sampled = sample(self._sampling, logits, inputs.sampling_slots, inputs.sampling_positions)
        self._batch.record(inputs.sampling_slots, sampled.token_ids)
        token_ids, logprobs = sampled.to_host()
        return pack_ids(token_ids), logprobs

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
