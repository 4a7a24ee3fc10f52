"""Gemma 2: soft-capped scores and logits, a sliding window in every other layer."""

from typing import Any

from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, attention
from radixrt.models.gemma import GemmaDecoderLayer, gemma_norm
from radixrt.models.hf_config import head_dim, sliding_windows


class Gemma2ForCausalLM(CausalLM):
    """Scores are scaled by ``query_pre_attn_scalar``, which need not be the head dimension."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        rotary = RotaryEmbedding(rope_config(config, head_dim(config), context_length))
        windows = sliding_windows(config)

        def layer(index: int) -> GemmaDecoderLayer:
            self_attn = attention(
                config,
                index,
                rotary,
                tp,
                scale=config.query_pre_attn_scalar**-0.5,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                sliding_window=windows[index],
                soft_cap=config.attn_logit_softcapping,
            )
            return GemmaDecoderLayer(config, self_attn, tp)

        super().__init__(
            config,
            tp,
            [layer(i) for i in range(config.num_hidden_layers)],
            norm=gemma_norm(config, config.hidden_size),
            embedding_scale=config.hidden_size**0.5,
            logit_soft_cap=config.final_logit_softcapping,
        )
