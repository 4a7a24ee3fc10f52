"""Qwen3-MoE: Qwen3 with experts in the place of most MLPs."""

from collections.abc import Iterator

from torch import Tensor, nn

from radixrt.layers.moe import Experts, Router, SparseMoE, split_fused_experts
from radixrt.models.families.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Which layers have experts is the config's choice: ``mlp_only_layers``,
    ``decoder_sparse_step``."""

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        hidden, count = config.hidden_size, config.num_experts
        is_sparse = count > 0 and (index + 1) % config.decoder_sparse_step == 0
        if not is_sparse or index in (config.mlp_only_layers or []):
            return super().mlp(index)
        router = Router(hidden, count, config.num_experts_per_tok, normalize=config.norm_topk_prob)
        size, act = config.moe_intermediate_size, config.hidden_act
        return SparseMoE(router, Experts(count, hidden, size, act, self.tp))

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from split_fused_experts(name, tensor)
