"""Qwen3: Qwen2 with a norm on each head of query and key in place of the biases."""

from typing import Any

from radixrt.layers.mlp import GatedMLP
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim, sliding_windows


class Qwen3ForCausalLM(CausalLM):
    """The head dimension is the config's own: 128 whatever the hidden size."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        windows = sliding_windows(config)
        size, act = config.intermediate_size, config.hidden_act

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(
                config,
                index,
                rotary,
                tp,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                sliding_window=windows[index],
                query_norm=RMSNorm(head_dim(config), config.rms_norm_eps),
                key_norm=RMSNorm(head_dim(config), config.rms_norm_eps),
            )
            mlp = GatedMLP(config.hidden_size, size, tp, activation=act)
            return DecoderLayer(config, self_attn, mlp)

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])
