"""Qwen2 and Qwen2.5: Llama with a bias on query, key and value, and sliding windows in some
layers."""

from typing import Any

from radixrt.layers.hf_config import sliding_window
from radixrt.models.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The published checkpoints switch their windows off (``use_sliding_window``)."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {"qkv_bias": True, "sliding_window": sliding_window(self.config, index)}
