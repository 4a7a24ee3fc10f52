"""Seed-OSS: Llama with a bias on query, key and value."""

from typing import Any

from radixrt.models.decoder import CausalLM


class SeedOssForCausalLM(CausalLM):
    """The config sets the output's bias apart."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            "qkv_bias": self.config.attention_bias,
            "output_bias": self.config.attention_out_bias,
        }
