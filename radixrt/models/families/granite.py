"""Granite 3 and 4 (dense): Llama, with factors on embeddings, scores, blocks and logits."""

from typing import Any

from torch import Tensor

from radixrt.attention.backend import ForwardContext
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import DecoderLayer
from radixrt.models.families.llama import LlamaForCausalLM


class GraniteDecoderLayer(DecoderLayer):
    """A block's output is multiplied before it joins the residual stream."""

    def __init__(self, config: Any, *blocks: Any) -> None:
        super().__init__(config, *blocks)
        self.factor = config.residual_multiplier

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """See ``DecoderLayer.attend``."""
        hidden, residual = super().attend(hidden, residual, positions, context)
        return hidden * self.factor, residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DecoderLayer.feed_forward``."""
        hidden, residual = super().feed_forward(hidden, residual)
        return hidden * self.factor, residual


class GraniteForCausalLM(LlamaForCausalLM):
    """The config has all four factors."""

    layer_class = GraniteDecoderLayer

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.embedding_scale = config.embedding_multiplier
        self.logit_divisor = config.logits_scaling

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), "scale": self.config.attention_multiplier}
