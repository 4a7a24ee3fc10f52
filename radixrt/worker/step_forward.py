"""Runs the model on the inputs of a step: from a CUDA graph, from a tape, or kernel by kernel, with
the images and the adapters that its rows have."""

import numpy as np
import torch

from radixrt.attention.auxiliary import AuxiliaryStates
from radixrt.attention.backend import ForwardContext
from radixrt.worker.adapters import AdapterLoader
from radixrt.worker.batch import StepInputs
from radixrt.worker.images import ImageFeatures
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.kv.states import SlotStates
from radixrt.worker.replays import DecodeGraphs, StepTapes, with_adapters
from radixrt.worker.runner_parts import RunnerParts


class StepForward:
    """The model, and what a step of it reads beside its inputs."""

    def __init__(
        self,
        parts: RunnerParts,
        pool: KVPool,
        graphs: DecodeGraphs | None,
        states: SlotStates | None,
        adapters: AdapterLoader | None,
        images: ImageFeatures | None,
        auxiliary: AuxiliaryStates | None,
    ) -> None:
        """
        Args:
            auxiliary: takes the states that a head reads between the layers; None: it reads those
                of the last layer, or there is none.
        """
        self._model = parts.model
        self._backend = parts.backend
        self._graphs = graphs
        self._images = images
        self._adapter_rows = None if adapters is None else adapters.adapters.rows
        self._reads_last_states = parts.head is not None and auxiliary is None
        tables = None if states is None else states.tables
        self.context = ForwardContext(parts.backend, pool.kv_caches, tables, auxiliary)
        self._tapes = None
        if parts.taped:
            counts = parts.expert_counts
            self._tapes = StepTapes(parts.model, self.context, counts, self._adapter_rows)

    def forget_adapters(self) -> None:
        """Layers have other stacks of adapters."""
        if self._tapes is not None:
            self._tapes.forget_adapters()

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [rows, vocab] of the rows that sample, and hidden states: of these rows, or of all
        tokens [num_tokens, hidden_size] where prompts are scored or pooled, or a head reads
        them."""
        if not len(inputs.token_ids):  # all slots are deferred
            hidden = torch.empty(0, device=inputs.token_ids.device)
            return hidden, hidden.new_empty(0, self._model.vocab_size)
        if self._graphs is not None and inputs.graph_rows is not None:
            hidden = self._graphs.run(inputs)[: len(inputs.sampling_slots)]
            return hidden, self._model.logits(hidden)
        if inputs.positions.is_cpu:
            lengths = np.diff(inputs.attention.qo_indptr_cpu.numpy())
            self._model.prepare_positions(int((inputs.starts + lengths).max()))
        self._backend.plan(inputs.attention)
        everything = bool(inputs.prompt_spans or inputs.pooled or self._reads_last_states)
        hidden = self._hidden(inputs, None if everything else inputs.sampling_rows)
        return hidden, self._model.logits(hidden[inputs.sampling_rows] if everything else hidden)

    def _hidden(self, inputs: StepInputs, rows: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of ``rows``; None: of all tokens."""
        arguments = inputs.token_ids, inputs.positions
        if self._images is not None and inputs.images:
            return self._with_images(inputs, self._images, rows)
        if inputs.adapters is not None:
            if self._tapes is not None:
                return self._tapes.forward_with_adapters(*arguments, inputs.adapters, rows)
            lora = self._adapter_rows
            return with_adapters(self._model, self.context, lora, *arguments, inputs.adapters, rows)
        if self._tapes is not None:
            return self._tapes.forward(*arguments, rows)
        return self._model.forward(*arguments, self.context, rows)

    def _with_images(
        self, inputs: StepInputs, images: ImageFeatures, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of a step with placeholders of images, and maybe with adapters."""
        arguments = inputs.token_ids, inputs.positions, self.context
        features = images.rows(inputs.images)
        if inputs.adapters is None:
            return images.model.forward_with_images(*arguments, rows, features)
        assert self._adapter_rows is not None, "an adapter was admitted where there are none"
        with self._adapter_rows.use(inputs.adapters):
            hidden = images.model.forward_with_images(*arguments, None, features)
        return hidden if rows is None else hidden[rows]
