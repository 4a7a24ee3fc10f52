"""ModernBERT (Warner et al., 2024): rotary positions, a gated MLP, and a window in two of three
layers."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import ColumnParallelLinear, Projection, VocabParallelEmbedding
from radixrt.layers.mlp import gated_activation
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.encoders.encoder import (
    ALONE,
    Encoder,
    EncoderAttention,
    LayerNorm,
    activation,
    head_linear,
    linear,
)

_UNUSED = ("decoder.",)


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
        if name.startswith(_UNUSED):
            return
        if name.startswith(("head.", "classifier.")):
            if self.head is not None:
                yield name.replace("classifier.", "head.out."), tensor
            return
        name = re.sub(r"(layers\.\d+)\.mlp\.W", r"\1.W", name).replace(".Wo.", ".down.")
        name = name.replace(".attn.down.", ".attn.output.")
        name = name.replace("embeddings.tok_embeddings", "embed_tokens")
        yield name.replace("embeddings.norm", "embedding_norm"), tensor
