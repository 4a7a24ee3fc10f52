"""MiniMax M2: a sigmoid router, norms over all heads of query and key, half-rotated heads."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from radixrt.layers.moe import Experts, SigmoidRouter, SparseMoE
from radixrt.models.families.olmo import all_heads_norms
from radixrt.models.mixtures.mixtral import MixtralForCausalLM

_BIAS = ".e_score_correction_bias"


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    """Its checkpoints name the experts as Mixtral's do."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return all_heads_norms(self.config, self.tp)

    def mlp(self, index: int) -> SparseMoE:
        config = self.config
        hidden, size, count = config.hidden_size, config.intermediate_size, config.num_local_experts
        router = SigmoidRouter(hidden, count, config.num_experts_per_tok, normalize=True)
        return SparseMoE(router, Experts(count, hidden, size, config.hidden_act, self.tp))

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The bias of the choice is the router's here."""
        if name.endswith(_BIAS):
            name = f"{name.removesuffix(_BIAS).removesuffix('.gate')}.gate{_BIAS}"
        yield from super().translate(name, tensor)
