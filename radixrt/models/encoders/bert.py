"""BERT (Devlin et al., 2018), and RoBERTa and XLM-R, which count positions otherwise and have
another classifier."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.linear import VocabParallelEmbedding
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import parameter
from radixrt.models.encoders.encoder import (
    ALONE,
    Encoder,
    EncoderAttention,
    LayerNorm,
    activation,
    head_linear,
    linear,
)

_NAMES = {
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
        """See ``Encoder.forward``."""
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
            theirs = next((begin for begin in _NAMES if rest.startswith(begin)), "")
            yield f"layers.{number}.{_NAMES.get(theirs, '')}{rest.removeprefix(theirs)}", tensor
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
