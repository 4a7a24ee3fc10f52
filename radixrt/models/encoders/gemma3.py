"""EmbeddingGemma: Gemma 3 whose tokens see those behind them, as far as the windows of its local
layers reach."""

from typing import Any

from torch import Tensor

from radixrt.attention.backend import ForwardContext
from radixrt.layers.parallel import TensorParallel
from radixrt.models.gemma import Gemma3ForCausalLM


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
