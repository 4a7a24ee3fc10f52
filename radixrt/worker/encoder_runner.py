"""Executes the steps of an encoder: each prompt is computed whole, in one step, and leaves no
KV."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from radixrt.attention.backend import ForwardContext
from radixrt.attention.bidirectional import BidirectionalAttention
from radixrt.device.device import Device
from radixrt.messages.grammars import DropGrammar, LoadGrammar
from radixrt.messages.ids import unpack_ids
from radixrt.messages.steps import Admit, StepPlan, StepResult
from radixrt.models.encoders.encoder import Encoder
from radixrt.worker.launched_step import LaunchedStep, Vectors
from radixrt.worker.pooling import Pooler


class EncoderRunner:
    """The counterpart of :class:`radixrt.worker.runner.ModelRunner`: no cache, no sampling, no step
    in flight."""

    in_flight: LaunchedStep | None = None

    def __init__(self, model: Encoder, pooler: Pooler, device: Device) -> None:
        self._model = model
        self._pooler = pooler
        self._device = device
        self._attention = BidirectionalAttention()
        self._context = ForwardContext(self._attention, [()] * model.num_layers)
        self._admitted: dict[int, Admit] = {}
        """Prompts that are not computed yet, by slot."""

    def order(self, message: LoadGrammar | DropGrammar) -> None:
        """Nothing is generated, so no grammar is ever used."""

    def seconds_loading(self) -> float:
        return 0.0

    def collect(self) -> list[StepResult]:
        """A step is over when it returns."""
        return []

    @torch.inference_mode()
    def step(self, plan: StepPlan, waited_s: float = 0.0) -> list[StepResult]:
        """Compute the prompts of one plan, for which the worker has waited ``waited_s``."""
        begun = time.perf_counter()
        for slot in plan.release:
            self._admitted.pop(slot, None)
        self._admitted |= {admit.slot: admit for admit in plan.admit}
        slots = [chunk.slot for chunk in plan.prefill]
        vectors = []
        if slots:
            admits = [self._admitted.pop(slot) for slot in slots]
            values = self._vectors(admits)
            (arrived,) = self._device.download([values]).wait()
            found = Vectors(slots, [values.shape[1]] * len(slots), values)
            vectors = found.read(arrived.numpy())
        step_s = time.perf_counter() - begun
        return [
            StepResult(
                step_id=plan.step_id,
                slots=b"",
                token_ids=b"",
                vectors=vectors,
                forward_s=step_s,
                wait_s=waited_s,
                step_s=step_s,
            )
        ]

    def _vectors(self, admits: Sequence[Admit]) -> torch.Tensor:
        """The numbers of whole prompts: [prompts, size]"""
        prompts = [unpack_ids(admit.token_ids) for admit in admits]
        lengths = [len(prompt) for prompt in prompts]
        positions = [np.arange(length) for length in lengths]
        types = [
            (place >= admit.second_segment_start) & (admit.second_segment_start > 0)
            for place, admit in zip(positions, admits, strict=True)
        ]
        columns = (np.concatenate(parts).astype(np.int64) for parts in (prompts, positions, types))
        token_ids, places, token_types = self._device.upload(*columns)
        self._attention.plan_prompts(lengths, self._device.torch_device)
        hidden = self._model(token_ids, places, self._context, token_types)
        return self._pooler.vectors(self._pooler.pool(hidden, lengths))
