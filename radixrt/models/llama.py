"""Llama 2 and 3.x, and the many checkpoints that share their architecture."""

from typing import Any

from radixrt.layers.mlp import GatedMLP
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim


class LlamaForCausalLM(CausalLM):
    """The plain decoder: grouped-query attention, gated MLP, biases only where the config says so."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        size, act = config.intermediate_size, config.hidden_act
        bias = config.attention_bias

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(config, index, rotary, tp, qkv_bias=bias, output_bias=bias)
            mlp = GatedMLP(config.hidden_size, size, tp, activation=act, bias=config.mlp_bias)
            return DecoderLayer(config, self_attn, mlp)

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])
