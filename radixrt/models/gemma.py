"""What Gemma 2 and Gemma 3 share: norms on both sides of each block, and a GELU MLP."""

from typing import Any

import torch
from torch import nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.attention import SelfAttention
from radixrt.layers.mlp import GatedMLP
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel


class GemmaDecoderLayer(nn.Module):
    """A block's output is normed once more before it joins the residual stream."""

    def __init__(self, config: Any, self_attn: SelfAttention, tp: TensorParallel) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            tp,
            activation=config.hidden_activation,
        )
        self.input_layernorm = gemma_norm(config, config.hidden_size)
        self.post_attention_layernorm = gemma_norm(config, config.hidden_size)
        self.pre_feedforward_layernorm = gemma_norm(config, config.hidden_size)
        self.post_feedforward_layernorm = gemma_norm(config, config.hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``DecoderLayer.forward``."""
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, positions, context))
        hidden, residual = self.pre_feedforward_layernorm.add_and_norm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


def gemma_norm(config: Any, size: int) -> RMSNorm:
    """Gemma's RMSNorm, whose checkpoints store the weight minus one."""
    return RMSNorm(size, config.rms_norm_eps, unit_offset=True)
