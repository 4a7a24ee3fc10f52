"""LFM2: gated short convolutions in most layers, attention in the others."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.layers.mlp import SigmoidRouter, split_fused_experts
from radixrt.layers.norm import RMSNorm
from radixrt.layers.recurrent import ShortConvolution
from radixrt.models.hybrids.hybrid import HybridCausalLM

_NAMES = {
    "model.embedding_norm": "model.norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
}
_NAME = re.compile(rf"(?<![\w]){'|'.join(map(re.escape, _NAMES))}(?![\w])")


class Lfm2ForCausalLM(HybridCausalLM):
    """The config's ``layer_types`` says which layers are convolutions."""

    recurrent_name = "conv"
    activation = "silu"

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.norm_eps)

    def attention_options(self, index: int) -> dict[str, Any]:
        return self.head_norms()

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if config.block_ffn_dim_multiplier is not None:
                multiple = config.block_multiple_of
                size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
        return self.gated_mlp(size)

    def is_recurrent(self, index: int) -> bool:
        return bool(self.config.layer_types[index] == "conv")

    def recurrent(self, index: int) -> ShortConvolution:
        taps, bias = self.config.conv_L_cache, self.config.conv_bias
        return ShortConvolution(index, self.config.hidden_size, taps, bias, self.tp)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        while (renamed := _NAME.sub(lambda found: _NAMES[found[0]], name)) != name:
            name = renamed
        yield from super().translate(name, tensor)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """Experts in all but the first layers, chosen by a sigmoid and a bias."""

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        if index < config.num_dense_layers:
            return self.gated_mlp(config.intermediate_size)
        router = SigmoidRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        )
        return self.mixture(router, config.moe_intermediate_size)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for inner, part in super().translate(name, tensor):
            yield from split_fused_experts(inner, part)
            if inner.endswith(".mlp.gate.weight") and not self.config.use_expert_bias:
                bias = inner.replace(".weight", ".e_score_correction_bias")
                yield bias, torch.zeros(self.config.num_experts)
