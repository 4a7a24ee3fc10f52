"""Pools hidden states: turns those of a prompt into a vector, or into scores of classes; and
executes the steps of an encoder, in which each prompt is computed whole and leaves no KV."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.attention.backend import ForwardContext
from radixrt.attention.bidirectional import BidirectionalAttention
from radixrt.base.errors import ConfigError
from radixrt.device.device import Device
from radixrt.messages.ids import unpack_ids
from radixrt.messages.links import WorkerOrder
from radixrt.messages.requests import PoolingInfo
from radixrt.messages.steps import Admit, StepPlan, StepResult
from radixrt.models.checkpoint import read_json
from radixrt.models.encoders import Encoder
from radixrt.models.pooling import Pooling
from radixrt.worker.images import ImageFeatures
from radixrt.worker.launched_step import LaunchedStep, Vectors

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda scores: scores,
    "sigmoid": torch.sigmoid,
    "softmax": lambda scores: scores.softmax(-1),
    "Identity": lambda vectors: vectors,
    "Tanh": torch.tanh,
}
"""Of classifiers, and by the name of their class in torch those of linear layers behind the
pooling."""


class Pooler:
    """The way from hidden states to numbers.

    Args:
        classify: scores of the classes from pooled hidden states, [n, hidden_size] -> [n, classes].
    """

    def __init__(
        self,
        pooling: Pooling,
        classify: Callable[[Tensor], Tensor],
        hidden_size: int,
        device: torch.device,
    ) -> None:
        self._pooling = pooling
        self._classify = classify
        self._dense = [_Dense(folder, device) for folder in pooling.dense]
        self._size = len(pooling.labels) or [hidden_size, *(d.size for d in self._dense)][-1]

    @property
    def info(self) -> PoolingInfo:
        """Described for the clients."""
        pooling = self._pooling
        return PoolingInfo(
            task=pooling.task,
            size=self._size,
            normalized=pooling.normalize,
            labels=pooling.labels,
            dimensions=pooling.dimensions,
        )

    def pool(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """The hidden state that stands for each sequence: [num_tokens, hidden_size] -> [sequences,
        hidden_size] float32

        Args:
            lengths: tokens of each sequence, in the order of the rows.
        """
        parts = hidden.split(lengths)
        match self._pooling.mode:
            case "mean":
                return torch.stack([part.float().mean(0) for part in parts])
            case "cls":
                return torch.stack([part[0] for part in parts])
        return torch.stack([part[-1] for part in parts])

    def vectors(self, pooled: Tensor) -> Tensor:
        """Vectors, or scores of classes, of pooled hidden states: [n, hidden_size] -> [n, size]
        float32"""
        if self._pooling.task == "classify":
            return _ACTIVATIONS[self._pooling.activation](self._classify(pooled).float())
        pooled = pooled.float()
        for dense in self._dense:
            pooled = dense(pooled)
        return F.normalize(pooled, dim=-1) if self._pooling.normalize else pooled


class _Dense:
    """A linear layer behind the pooling, as sentence-transformers saves it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from safetensors.torch import load_file

        config: dict[str, Any] = read_json(folder / "config.json", dict)
        activation = str(config.get("activation_function")).rpartition(".")[2]
        file = folder / "model.safetensors"
        if activation not in _ACTIVATIONS or not file.is_file():
            raise ConfigError(
                f"{folder} holds no model.safetensors, or its activation {activation} is not supported."
            )
        tensors = load_file(file)
        self._weight = tensors["linear.weight"].float().to(device)
        bias = tensors.get("linear.bias")
        self._bias = None if bias is None else bias.float().to(device)
        self._activate = _ACTIVATIONS[activation]
        self.size = len(self._weight)

    def __call__(self, vectors: Tensor) -> Tensor:
        """[n, in_features] -> [n, out_features]"""
        return self._activate(F.linear(vectors, self._weight, self._bias))


class EncoderRunner:
    """The counterpart of :class:`radixrt.worker.runner.ModelRunner`: no cache, no sampling, no step
    in flight."""

    in_flight: LaunchedStep | None = None
    images: ImageFeatures | None = None

    def __init__(self, model: Encoder, pooler: Pooler, device: Device) -> None:
        self._model = model
        self._pooler = pooler
        self._device = device
        self._attention = BidirectionalAttention()
        self._context = ForwardContext(self._attention, [()] * model.num_layers)
        self._admitted: dict[int, Admit] = {}
        """Prompts that are not computed yet, by slot."""

    def order(self, message: WorkerOrder) -> None:
        """Nothing is generated, so no grammar is ever used; an encoder has no adapters."""

    def expert_tokens(self) -> None:
        """No encoder has experts."""

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
