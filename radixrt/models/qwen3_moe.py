"""Qwen3-MoE: Qwen3 with experts in the place of most MLPs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from radixrt.layers.mlp import GatedMLP
from radixrt.layers.moe import Experts, Router, SparseMoE, split_fused_experts
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, DecoderLayer, attention
from radixrt.models.hf_config import head_dim


class Qwen3MoeForCausalLM(CausalLM):
    """Which layers have experts is the config's choice: ``mlp_only_layers``, ``decoder_sparse_step``."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))

        def layer(index: int) -> DecoderLayer:
            self_attn = attention(
                config,
                index,
                rotary,
                tp,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                sliding_window=config.sliding_window if config.use_sliding_window else None,
                query_norm=RMSNorm(head_dim(config), config.rms_norm_eps),
                key_norm=RMSNorm(head_dim(config), config.rms_norm_eps),
            )
            return DecoderLayer(config, self_attn, _mlp(config, index, tp))

        super().__init__(config, tp, [layer(i) for i in range(config.num_hidden_layers)])

    def translate(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from split_fused_experts(name, tensor)


def _mlp(config: Any, index: int, tp: TensorParallel) -> nn.Module:
    hidden, count, act = config.hidden_size, config.num_experts, config.hidden_act
    is_sparse = count > 0 and (index + 1) % config.decoder_sparse_step == 0
    if not is_sparse or index in (config.mlp_only_layers or []):
        return GatedMLP(hidden, config.intermediate_size, tp, activation=act)
    router = Router(hidden, count, config.num_experts_per_tok, normalize=config.norm_topk_prob)
    return SparseMoE(router, Experts(count, hidden, config.moe_intermediate_size, act, tp))
