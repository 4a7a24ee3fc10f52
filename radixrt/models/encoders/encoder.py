"""The encoder that BERT's families derive from: hidden states of whole prompts, and scores of
classes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.base.errors import ConfigError
from radixrt.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import load_into, parameter, weight_slots

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations by transformers' names."""

ALONE = TensorParallel()
"""Encoders are not split over ranks."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a config names.

    Raises:
        ConfigError: it is not supported.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"The checkpoint's activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


class LayerNorm(nn.Module):
    """``(x - mean) / deviation * weight + bias`` (Ba et al., 2016)."""

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)
        self.bias = parameter(size) if bias else None
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


class EncoderAttention(nn.Module):
    """Multi-head attention of every token to all of its prompt.

    Args:
        names: of the checkpoint's tensors that make up the projection of query, key and value:
            three, or one for all.
        window: a token sees those at a smaller distance; None: all.
    """

    def __init__(
        self, config: Any, names: tuple[str, ...], bias: bool, window: int | None = None
    ) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        head_dim = size // heads
        self.spec = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, sliding_window=window)
        parts = [Projection.even(name, 3 * size // len(names), ALONE) for name in names]
        self.qkv = ColumnParallelLinear(size, parts, bias)
        self.output = RowParallelLinear(size, size, bias, ALONE)

    def forward(
        self, hidden: Tensor, context: ForwardContext, rotate: Callable[..., Any] | None = None
    ) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]

        Args:
            rotate: (query, key) -> both by their positions.
        """
        heads = self.qkv.forward(hidden).unflatten(1, (3, self.spec.num_heads, -1))
        query, key, value = heads.unbind(1)
        if rotate is not None:
            query, key = rotate(query, key)
        attended = context.backend.attend(AttentionInputs(query, key, value, (), self.spec))
        return self.output.forward(attended.flatten(1))


class Encoder(nn.Module, ABC):
    """Hidden states of prompts, and scores of classes. Families make the layers and name the
    tensors."""

    num_parameters: int
    lm_head = None
    generates = False

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: transformers'.
        """
        super().__init__()
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.dtype = torch.get_default_dtype()
        self.num_layers: int = config.num_hidden_layers

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, context: ForwardContext, token_types: Tensor
    ) -> Tensor:
        """Hidden states: [num_tokens, hidden_size]

        Args:
            input_ids: [num_tokens] of all prompts of the step, flat.
            positions: [num_tokens] of each token in its prompt.
            token_types: [num_tokens] 1 in the second text of a pair, else 0.
        """

    @abstractmethod
    def replace_head(self, num_classes: int) -> None:
        """Make the classifier's layers, if there are any classes."""

    @abstractmethod
    def classify(self, pooled: Tensor) -> Tensor:
        """Scores of the classes: [n, hidden_size] -> [n, classes]"""

    @abstractmethod
    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A checkpoint's tensor under the name used here; nothing: it is not needed."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the model.

        Raises:
            ConfigError: tensors are missing, unexpected or misshapen; names some of them.
        """
        renamed = (pair for name, tensor in tensors for pair in self.translate(name, tensor))
        load_into(weight_slots(self), renamed, set())


def linear(inputs: int, outputs: int, bias: bool = True) -> RowParallelLinear:
    """A linear layer of one rank."""
    return RowParallelLinear(inputs, outputs, bias, ALONE)


def head_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer of a classifier's head, whose weights stay plain."""
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
