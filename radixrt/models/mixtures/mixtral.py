"""Mixtral: Mistral with eight experts in the place of each MLP."""

import re
from collections.abc import Iterator

from torch import Tensor

from radixrt.layers.moe import Experts, Router, SparseMoE, split_fused_experts
from radixrt.models.families.mistral import MistralForCausalLM

_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MixtralForCausalLM(MistralForCausalLM):
    """Each token goes to two experts, whose weights are scaled to sum to one."""

    def mlp(self, index: int) -> SparseMoE:
        config = self.config
        hidden, size, count = config.hidden_size, config.intermediate_size, config.num_local_experts
        router = Router(hidden, count, config.num_experts_per_tok, normalize=True)
        return SparseMoE(router, Experts(count, hidden, size, config.hidden_act, self.tp))

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``block_sparse_moe.experts.0.w1`` is ``mlp.experts.0.gate_proj`` here, as in other
        models."""
        name = name.replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"\.(w[123])\.", lambda w: f".{_PROJECTIONS[w[1]]}.", name)
        yield from split_fused_experts(name, tensor)
