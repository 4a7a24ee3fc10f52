"""Mistral 7B and its successors: Llama, with a sliding window where the config says so."""

from typing import Any

from radixrt.layers.mlp import GatedMLP
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim


class MistralForCausalLM(CausalLM):
    """All layers share one sliding window: 4,096 tokens in v0.1, none since v0.2."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        size, act = config.intermediate_size, config.hidden_act

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(config, index, rotary, tp, sliding_window=config.sliding_window)
            mlp = GatedMLP(config.hidden_size, size, tp, activation=act)
            return DecoderLayer(config, self_attn, mlp)

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])
