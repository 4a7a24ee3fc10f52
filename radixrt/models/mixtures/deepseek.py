"""DeepSeek V2 and V3, and the models with their layers (Kimi K2, Moonlight, GLM-4.7-Flash): latent
attention, and experts beside shared ones."""

from typing import Any

from radixrt.layers.attention import AttentionBlock
from radixrt.layers.latent_attention import LatentAttention
from radixrt.layers.moe import SigmoidRouter, SoftmaxGroupRouter
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.mixtures.glm4_moe import Glm4MoeForCausalLM


class DeepseekV3ForCausalLM(Glm4MoeForCausalLM):
    """The first layers have a dense MLP. The layers behind the last, which predict further tokens,
    are left out."""

    def attention(self, index: int, rotary: RotaryEmbedding) -> AttentionBlock:
        return LatentAttention(self.config, index, rotary, self.tp)

    def rotary(self, context_length: int, layer_type: str | None) -> RotaryEmbedding:
        interleaved = getattr(self.config, "rope_interleave", True)
        return RotaryEmbedding(self.config, context_length, layer_type, interleaved, by_parts=True)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    def is_dense(self, index: int) -> bool:
        dense: bool = self.config.mlp_layer_types[index] == "dense"
        return dense


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """Experts are weighted by a softmax over all of them; there is no bias."""

    def router(self) -> SigmoidRouter:
        config: Any = self.config
        grouped = config.topk_method == "group_limited_greedy"
        return SoftmaxGroupRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            normalize=False,
            num_groups=config.n_group if grouped else 1,
            top_groups=config.topk_group if grouped else 1,
            factor=config.routed_scaling_factor,
        )
