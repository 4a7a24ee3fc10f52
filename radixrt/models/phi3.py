"""Phi-3 and Phi-3.5 (text): Llama with fused projections in the checkpoint, partial and long rotary."""

from collections.abc import Iterator
from typing import Any

import torch

from radixrt.errors import ConfigError
from radixrt.layers.mlp import GatedMLP
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim


class Phi3ForCausalLM(CausalLM):
    """The 128k checkpoints use LongRoPE; ``radixrt.layers.rotary`` says how it is decided once."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        size, act = config.intermediate_size, config.hidden_act

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(config, index, rotary, tp, sliding_window=config.sliding_window)
            mlp = GatedMLP(config.hidden_size, size, tp, activation=act)
            return DecoderLayer(config, self_attn, mlp)

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])

    def translate(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """``qkv_proj`` and ``gate_up_proj`` are cut into the projections they are made of."""
        config, dim = self.config, head_dim(self.config)
        query, key_value = config.num_attention_heads * dim, config.num_key_value_heads * dim
        fused = {
            "qkv_proj": {"q_proj": query, "k_proj": key_value, "v_proj": key_value},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
        for whole, parts in fused.items():
            if f".{whole}." in name:
                if tensor.shape[0] != sum(parts.values()):
                    raise ConfigError(
                        f"The checkpoint's {name} has {tensor.shape[0]} rows; its config.json asks for "
                        f"{sum(parts.values())}."
                    )
                for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
                    yield name.replace(whole, part), rows
                return
        yield name, tensor
