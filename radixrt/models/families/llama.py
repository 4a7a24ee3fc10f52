"""Llama 2 and 3.x, and the many checkpoints that share their architecture."""

from typing import Any

from radixrt.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """The plain decoder: grouped-query attention, gated MLP, biases only where the config says
    so."""

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        return {"qkv_bias": bias, "output_bias": bias}
