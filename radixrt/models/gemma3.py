"""Gemma 3 (text): norms on query and key, and two rotary embeddings, for local and global layers."""

from collections.abc import Iterator
from typing import Any

import torch

from radixrt.errors import ConfigError
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding, rope_config
from radixrt.models.decoder import CausalLM, attention
from radixrt.models.gemma import GemmaDecoderLayer, gemma_norm
from radixrt.models.hf_config import head_dim, sliding_windows


class Gemma3ForCausalLM(CausalLM):
    """Five layers with a sliding window to one without; only the latter's rotary base is stretched."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        if getattr(config, "use_bidirectional_attention", False):
            raise ConfigError("Bidirectional attention (of embedding models) is not supported.")
        dim = head_dim(config)
        rotaries = {
            kind: RotaryEmbedding(rope_config(config, dim, context_length, kind))
            for kind in set(config.layer_types)
        }
        windows = sliding_windows(config)

        def layer(index: int) -> GemmaDecoderLayer:
            self_attn = attention(
                config,
                index,
                rotaries[config.layer_types[index]],
                tp,
                scale=config.query_pre_attn_scalar**-0.5,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                sliding_window=windows[index],
                query_norm=gemma_norm(config, dim),
                key_norm=gemma_norm(config, dim),
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


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a checkpoint that also sees images; its vision part is left out."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int | None = None) -> None:
        super().__init__(config.text_config, tp, context_length)

    def translate(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Strip the language model's prefix: ``language_model.model.`` or ``model.language_model.``"""
        if "vision_tower." in name or "multi_modal_projector." in name:
            return
        name = name.replace("model.language_model.", "model.", 1)
        yield name.removeprefix("language_model."), tensor
