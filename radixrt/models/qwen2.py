"""Qwen2 and Qwen2.5: Llama with a bias on query, key and value, and sliding windows in some layers."""

from typing import Any

from radixrt.layers.mlp import GatedMLP
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim, sliding_windows


class Qwen2ForCausalLM(CausalLM):
    """The published checkpoints switch their windows off (``use_sliding_window``)."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        windows = sliding_windows(config)
        size, act = config.intermediate_size, config.hidden_act

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(
                config, index, rotary, tp, qkv_bias=True, sliding_window=windows[index]
            )
            mlp = GatedMLP(config.hidden_size, size, tp, activation=act)
            return DecoderLayer(config, self_attn, mlp)

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])
