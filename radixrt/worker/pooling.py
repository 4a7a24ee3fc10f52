"""Pools hidden states: turns those of a prompt into a vector, or into scores of classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.messages.requests import PoolingInfo
from radixrt.models.checkpoint import read_json
from radixrt.models.pooling import Pooling

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
        hidden_size: of the model.
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
