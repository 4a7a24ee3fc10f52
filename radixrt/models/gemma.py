"""Gemma 2 and 3: norms on both sides of each block, a GELU MLP, scaled scores and embeddings."""

from typing import Any

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.hf_config import sliding_window
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import CausalLM, DecoderLayer


class GemmaDecoderLayer(DecoderLayer):
    """A block's output is normed once more before it joins the residual stream."""

    def __init__(self, config: Any, self_attn: AttentionBlock, mlp: nn.Module) -> None:
        super().__init__(config, self_attn, mlp)
        self.input_layernorm = gemma_norm(config, config.hidden_size)
        self.post_attention_layernorm = gemma_norm(config, config.hidden_size)
        self.pre_feedforward_layernorm = gemma_norm(config, config.hidden_size)
        self.post_feedforward_layernorm = gemma_norm(config, config.hidden_size)

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.post_attention_layernorm.forward(hidden)
        hidden, residual = self.pre_feedforward_layernorm.add_and_norm(attended, residual)
        return self.post_feedforward_layernorm.forward(self.mlp.forward(hidden)), residual


def gemma_norm(config: Any, size: int) -> RMSNorm:
    """Gemma's RMSNorm, whose checkpoints store the weight minus one."""
    return RMSNorm(size, config.rms_norm_eps, unit_offset=True)


def rounded(number: float) -> float:
    """A factor of embeddings, rounded to the model's dtype as in Gemma's training; while the model
    is made."""
    return torch.tensor(number, device="cpu").item()


class GemmaForCausalLM(CausalLM):
    """Scores are scaled by ``query_pre_attn_scalar``, which need not be the head dimension."""

    layer_class = GemmaDecoderLayer

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.embedding_scale = rounded(config.hidden_size**0.5)

    def attention_options(self, index: int) -> dict[str, Any]:
        config = self.config
        return {
            "scale": config.query_pre_attn_scalar**-0.5,
            "qkv_bias": config.attention_bias,
            "output_bias": config.attention_bias,
            "sliding_window": sliding_window(config, index),
        }

    def norm(self, size: int) -> RMSNorm:
        return gemma_norm(self.config, size)


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Scores are capped before the mask, logits at the end."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.logit_soft_cap = config.final_logit_softcapping

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), "soft_cap": self.config.attn_logit_softcapping}


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Five layers with a sliding window to one without; only the latter's rotary base is
    stretched."""

    is_causal = True

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        if getattr(config, "use_bidirectional_attention", False) is self.is_causal:
            raise ConfigError(
                "The checkpoint's architecture and its field 'use_bidirectional_attention' contradict each other: that of a "
                "model with attention in both directions is Gemma3TextModel."
            )
        super().__init__(config, tp, context_length)

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), **self.head_norms()}

    def rope_layer_type(self, index: int) -> str | None:
        return self.config.layer_types[index]
