"""Encoders: models whose tokens see those behind them. They give vectors and classes, and keep no
KV.

BERT (Devlin et al., 2018), with RoBERTa and XLM-R, which count positions otherwise and have another
classifier; ModernBERT (Warner et al., 2024), with rotary positions, a gated MLP and a window in two
of three layers; EmbeddingGemma, a Gemma 3 with windows on both sides.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import (
    ColumnParallelLinear,
    Projection,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from radixrt.layers.mlp import gated_activation
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import load_into, parameter, weight_slots
from radixrt.models.gemma import Gemma3ForCausalLM

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


_BERT_NAMES = {
    "attention.self.": "attention.",
    "attention.output.dense.": "attention.output.",
    "attention.output.LayerNorm.": "attention_norm.",
    "intermediate.dense.": "up.",
    "output.dense.": "down.",
    "output.LayerNorm.": "output_norm.",
}
"""Prefixes of the tensors of a layer: the checkpoint's and ours. The first that fits holds."""

_UNUSED = ("cls.", "lm_head.", "embeddings.position_ids")
"""Beginnings of tensors of other tasks, and tables that are computed."""


class BertLayer(nn.Module):
    """Attention and MLP, each followed by the residual addition and a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention = EncoderAttention(config, ("query", "key", "value"), bias=True)
        self.attention_norm = LayerNorm(size, config.layer_norm_eps)
        self.up = linear(size, config.intermediate_size)
        self.down = linear(config.intermediate_size, size)
        self.output_norm = LayerNorm(size, config.layer_norm_eps)
        self.activate = activation(config.hidden_act)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        hidden = self.attention_norm(hidden + self.attention.forward(hidden, context))
        up = self.activate(self.up.forward(hidden))
        return self.output_norm(hidden + self.down.forward(up))


class BertModel(Encoder):
    """Word, position and type of each token are added; the classifier reads the first token."""

    first_position = 0
    """Row of the position table for the first token."""
    prefix = "bert."

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, ALONE)
        self.position_embeddings = parameter(config.max_position_embeddings, size)
        self.type_embeddings = parameter(config.type_vocab_size, size)
        self.embedding_norm = LayerNorm(size, config.layer_norm_eps)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(self.num_layers))
        self.head: nn.Sequential | None = None

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: ForwardContext, token_types: Tensor
    ) -> Tensor:
        types = token_types.clamp(max=len(self.type_embeddings) - 1)
        hidden = self.embed_tokens.forward(input_ids) + self.type_embeddings[types]
        hidden = hidden + self.position_embeddings[positions + self.first_position]
        hidden = self.embedding_norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden, context)
        return hidden

    def replace_head(self, num_classes: int) -> None:
        if num_classes:
            size = self.config.hidden_size
            dense, out = head_linear(size, size), head_linear(size, num_classes)
            self.head = nn.Sequential(dense, nn.Tanh(), out)

    def classify(self, pooled: Tensor) -> Tensor:
        assert self.head is not None, "the checkpoint is no classifier"
        scores: Tensor = self.head(pooled)
        return scores

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = name.removeprefix(self.prefix)
        name = name.replace(".gamma", ".weight").replace(
            ".beta", ".bias"
        )  # of the first checkpoints
        if name.startswith(_UNUSED):
            return
        if (found := self.head_name(name)) is not None:
            if self.head is not None:
                yield found, tensor
            return
        if layer := re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", name):
            number, rest = layer.groups()
            theirs = next((begin for begin in _BERT_NAMES if rest.startswith(begin)), "")
            yield (
                f"layers.{number}.{_BERT_NAMES.get(theirs, '')}{rest.removeprefix(theirs)}",
                tensor,
            )
            return
        name = name.replace("embeddings.word_embeddings", "embed_tokens")
        name = name.replace("embeddings.position_embeddings.weight", "position_embeddings")
        name = name.replace("embeddings.token_type_embeddings.weight", "type_embeddings")
        yield name.replace("embeddings.LayerNorm", "embedding_norm"), tensor

    def head_name(self, name: str) -> str | None:
        """Our name of a tensor of the classifier; None: it is none."""
        for theirs, ours in (("pooler.dense.", "head.0."), ("classifier.", "head.2.")):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return None


class RobertaModel(BertModel):
    """Positions count from the padding token's id + 1."""

    prefix = "roberta."

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.first_position = config.pad_token_id + 1

    def head_name(self, name: str) -> str | None:
        for theirs, ours in (("classifier.dense.", "head.0."), ("classifier.out_proj.", "head.2.")):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return "" if name.startswith("pooler.") else None


_NOT_OURS = ("decoder.",)


class ModernBertLayer(KernelLayer):
    """Attention and MLP, each behind a norm; the first layer reads the norm of the embedding."""

    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size = config.hidden_size
        norm = partial(LayerNorm, size, config.norm_eps, config.norm_bias)
        is_local = config.layer_types[index] == "sliding_attention"
        window = config.sliding_window + 1 if is_local else None
        self.rotary = rotary
        self.attn_norm = norm() if index else None
        self.attn = EncoderAttention(config, ("Wqkv",), config.attention_bias, window)
        self.mlp_norm = norm()
        gate_up = [Projection.even("Wi", 2 * config.intermediate_size, ALONE)]
        self.gate_up = ColumnParallelLinear(size, gate_up, config.mlp_bias)
        self.down = linear(config.intermediate_size, size, config.mlp_bias)
        self.activation = gated_activation(config.hidden_activation)

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], positions [num_tokens] -> [num_tokens, hidden_size]"""
        normed = hidden if self.attn_norm is None else self.attn_norm(hidden)
        rotate = partial(self.rotary.forward, positions)
        hidden = hidden + self.attn.forward(normed, context, rotate)
        gate_up = self.gate_up.forward(self.mlp_norm(hidden))
        return hidden + self.down.forward(self.kernels.gated_activation(self.activation, gate_up))


class ModernBertModel(Encoder):
    """The classifier reads the pooled hidden state through a dense layer and a norm."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config)
        kinds = config.layer_types
        rotaries = {kind: RotaryEmbedding(config, context_length, kind) for kind in set(kinds)}
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ALONE)
        self.embedding_norm = self._norm()
        self.layers = nn.ModuleList(
            ModernBertLayer(config, index, rotaries[kind]) for index, kind in enumerate(kinds)
        )
        self.final_norm = self._norm()
        self.head: nn.ModuleDict | None = None

    def _norm(self) -> LayerNorm:
        config = self.config
        return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: ForwardContext, token_types: Tensor
    ) -> Tensor:
        """See ``Encoder.forward``; there are no types of tokens."""
        hidden = self.embedding_norm(self.embed_tokens.forward(input_ids))
        for layer in self.layers:
            hidden = layer(hidden, positions, context)
        return self.final_norm(hidden)

    def replace_head(self, num_classes: int) -> None:
        if num_classes:
            config = self.config
            self.activate = activation(config.classifier_activation)
            self.head = nn.ModuleDict(
                {
                    "dense": head_linear(
                        config.hidden_size, config.hidden_size, config.classifier_bias
                    ),
                    "norm": self._norm(),
                    "out": head_linear(config.hidden_size, num_classes),
                }
            )

    def classify(self, pooled: Tensor) -> Tensor:
        assert self.head is not None, "the checkpoint is no classifier"
        normed = self.head["norm"](self.activate(self.head["dense"](pooled)))
        scores: Tensor = self.head["out"](normed)
        return scores

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = name.removeprefix("model.")
        if name.startswith(_NOT_OURS):
            return
        if name.startswith(("head.", "classifier.")):
            if self.head is not None:
                yield name.replace("classifier.", "head.out."), tensor
            return
        name = re.sub(r"(layers\.\d+)\.mlp\.W", r"\1.W", name).replace(".Wo.", ".down.")
        name = name.replace(".attn.down.", ".attn.output.")
        name = name.replace("embeddings.tok_embeddings", "embed_tokens")
        yield name.replace("embeddings.norm", "embedding_norm"), tensor


class Gemma3TextModel(Gemma3ForCausalLM):
    """The layers are Gemma's; attention in both directions is the context's."""

    is_causal = False

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.num_layers: int = config.num_hidden_layers

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """See ``Encoder.forward``; there are no types of tokens."""
        return super().forward(input_ids, positions, context)
