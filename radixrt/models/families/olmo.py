"""OLMo 2 and 3: norms behind the blocks, and over all heads of query and key."""

from typing import Any

from radixrt.layers.hf_config import head_dim, sliding_window
from radixrt.layers.norm import AllHeadsNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import PostNormDecoderLayer
from radixrt.models.families.llama import LlamaForCausalLM


def all_heads_norms(config: Any, tp: TensorParallel) -> dict[str, AllHeadsNorm]:
    """The norms of query and key, as ``SelfAttention`` takes them."""
    counts = {"query_norm": config.num_attention_heads, "key_norm": config.num_key_value_heads}
    return {
        name: AllHeadsNorm(count, head_dim(config), config.rms_norm_eps, tp)
        for name, count in counts.items()
    }


class Olmo2ForCausalLM(LlamaForCausalLM):
    """One norm is over the heads of the query together, one over those of the key."""

    layer_class = PostNormDecoderLayer

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), **all_heads_norms(self.config, self.tp)}


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three layers with a sliding window to one without; only the latter's rotary frequencies are
    stretched."""

    def attention_options(self, index: int) -> dict[str, Any]:
        window = sliding_window(self.config, index)
        return {**super().attention_options(index), "sliding_window": window}

    def rope_layer_type(self, index: int) -> str | None:
        return self.config.layer_types[index]
