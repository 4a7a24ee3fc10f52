"""Mixtral: Mistral with eight experts in the place of each MLP."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from radixrt.layers.moe import Experts, Router, SparseMoE, split_fused_experts
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim

_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MixtralForCausalLM(CausalLM):
    """Each token goes to two experts, whose weights are scaled to sum to one."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        hidden, size, count = config.hidden_size, config.intermediate_size, config.num_local_experts

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(config, index, rotary, tp, sliding_window=config.sliding_window)
            router = Router(hidden, count, config.num_experts_per_tok, normalize=True)
            experts = Experts(count, hidden, size, config.hidden_act, tp)
            return DecoderLayer(config, self_attn, SparseMoE(router, experts))

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])

    def translate(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """``block_sparse_moe.experts.0.w1`` is ``mlp.experts.0.gate_proj`` here, as in other models."""
        name = name.replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"\.(w[123])\.weight$", lambda w: f".{_PROJECTIONS[w[1]]}.weight", name)
        yield from split_fused_experts(name, tensor)
