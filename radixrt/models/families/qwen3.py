"""Qwen3: Qwen2 with a norm on each head of query and key in place of the biases."""

from typing import Any

from radixrt.layers.hf_config import head_dim, sliding_window
from radixrt.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """The config sets the head dimension: 128 for any hidden size."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            "qkv_bias": self.config.attention_bias,
            "output_bias": self.config.attention_bias,
            "sliding_window": sliding_window(self.config, index),
            "query_norm": self.norm(head_dim(self.config)),
            "key_norm": self.norm(head_dim(self.config)),
        }
