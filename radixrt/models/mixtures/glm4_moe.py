"""GLM-4.5 to 4.7: a sigmoid router with groups, a shared expert, half-rotated heads."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from radixrt.layers.hf_config import head_dim
from radixrt.layers.mlp import GatedMLP
from radixrt.layers.moe import Experts, SigmoidRouter, SparseMoE, split_fused_experts
from radixrt.models.decoder import CausalLM


class Glm4MoeForCausalLM(CausalLM):
    """The first layers have a dense MLP. The layers behind the last, which predict further tokens,
    are left out."""

    def attention_options(self, index: int) -> dict[str, Any]:
        names = ("query_norm", "key_norm") if self.config.use_qk_norm else ()
        norms = {name: self.norm(head_dim(self.config)) for name in names}
        return {"qkv_bias": self.config.attention_bias, **norms}

    def is_dense(self, index: int) -> bool:
        """Whether a layer has no experts."""
        return bool(index < self.config.first_k_dense_replace)

    def router(self) -> SigmoidRouter:
        config = self.config
        return SigmoidRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            factor=config.routed_scaling_factor,
        )

    def mlp(self, index: int) -> nn.Module:
        if self.is_dense(index):
            return super().mlp(index)
        config = self.config
        hidden, size, act = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        experts = Experts(config.n_routed_experts, hidden, size, act, self.tp)
        shared = None
        if config.n_shared_experts:
            shared = GatedMLP(hidden, size * config.n_shared_experts, self.tp, activation=act)
        return SparseMoE(self.router(), experts, shared)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        _, is_layer, rest = name.partition("model.layers.")
        if is_layer and int(rest.partition(".")[0]) >= self.config.num_hidden_layers:
            return
        yield from split_fused_experts(name, tensor)
