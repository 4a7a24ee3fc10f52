"""LFM2: gated short convolutions in most layers, attention in the others."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from radixrt.layers.attention import SelfAttention
from radixrt.layers.hf_config import head_dim
from radixrt.layers.mlp import GatedMLP
from radixrt.layers.norm import RMSNorm
from radixrt.layers.recurrent import ShortConvolution
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.decoder import CausalLM
from radixrt.models.hybrids.hybrid import HybridDecoderLayer

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


class Lfm2ForCausalLM(CausalLM):
    """The config's ``layer_types`` says which layers are convolutions."""

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.norm_eps)

    def attention_options(self, index: int) -> dict[str, Any]:
        return {name: self.norm(head_dim(self.config)) for name in ("query_norm", "key_norm")}

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if config.block_ffn_dim_multiplier is not None:
                multiple = config.block_multiple_of
                size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
        return GatedMLP(config.hidden_size, size, self.tp, activation="silu")

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        config, norms = (
            self.config,
            (self.norm(self.config.hidden_size), self.norm(self.config.hidden_size)),
        )
        if config.layer_types[index] != "conv":
            attention = SelfAttention(
                config, index, rotary, self.tp, **self.attention_options(index)
            )
            return HybridDecoderLayer("self_attn", attention, self.mlp(index), norms)
        taps, bias = config.conv_L_cache, config.conv_bias
        convolution = ShortConvolution(index, config.hidden_size, taps, bias, self.tp)
        return HybridDecoderLayer("conv", convolution, self.mlp(index), norms)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        while (renamed := _NAME.sub(lambda found: _NAMES[found[0]], name)) != name:
            name = renamed
        yield name, tensor
