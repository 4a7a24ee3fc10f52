"""ERNIE 4.5 (dense): Llama, whose rotated pairs are neighbours."""

from typing import Any

from radixrt.layers.mlp import GatedMLP
from radixrt.models.decoder import CausalLM


class Ernie4_5ForCausalLM(CausalLM):
    """One field of the config, ``use_bias``, sets the biases of all projections."""

    rope_interleaved = True

    def attention_options(self, index: int) -> dict[str, Any]:
        return {"qkv_bias": self.config.use_bias, "output_bias": self.config.use_bias}

    def mlp(self, index: int) -> GatedMLP:
        config = self.config
        size, act = config.intermediate_size, config.hidden_act
        return GatedMLP(config.hidden_size, size, self.tp, activation=act, bias=config.use_bias)
