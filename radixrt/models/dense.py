"""The dense architectures that are Llama's but for some options: biases, windows, norms, rotation."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from radixrt.attention.backend import ForwardContext
from radixrt.base.errors import ConfigError
from radixrt.layers.hf_config import head_dim, sliding_window
from radixrt.layers.mlp import GatedMLP
from radixrt.layers.norm import AllHeadsNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import CausalLM, DecoderLayer, PostNormDecoderLayer


class LlamaForCausalLM(CausalLM):
    """The plain decoder: grouped-query attention, gated MLP, biases only where the config says
    so."""

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        return {"qkv_bias": bias, "output_bias": bias}


class MistralForCausalLM(CausalLM):
    """All layers share one sliding window: 4,096 tokens in v0.1, none since v0.2."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {"sliding_window": self.config.sliding_window}


class Ministral3ForCausalLM(MistralForCausalLM):
    """Queries within the original context are not scaled; those of its next lengths are, one step a
    length."""

    def attention_options(self, index: int) -> dict[str, Any]:
        grows = "llama_4_scaling_beta" in self.config.rope_parameters
        scale = self._query_scale if grows else None
        return {**super().attention_options(index), "query_scale": scale}

    def _query_scale(self, positions: Tensor) -> Tensor:
        rope = self.config.rope_parameters
        lengths = positions // rope["original_max_position_embeddings"]
        return 1.0 + rope["llama_4_scaling_beta"] * torch.log1p(lengths.float())


class Phi3ForCausalLM(MistralForCausalLM):
    """The 128k checkpoints use LongRoPE; ``radixrt.layers.rotary`` says how it is decided once."""

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``qkv_proj`` and ``gate_up_proj`` are cut into the projections they are made of."""
        config, dim = self.config, head_dim(self.config)
        query, key_value = config.num_attention_heads * dim, config.num_key_value_heads * dim
        fused = {
            "qkv_proj": {"q_proj": query, "k_proj": key_value, "v_proj": key_value},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
        for whole, parts in fused.items():
            if f".{whole}." in name:
                if tensor.shape[0] != sum(parts.values()):
                    raise ConfigError(
                        f"The checkpoint's {name} has {tensor.shape[0]} rows; its config.json asks for "
                        f"{sum(parts.values())}."
                    )
                for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
                    yield name.replace(whole, part), rows
                return
        yield name, tensor


class Qwen2ForCausalLM(CausalLM):
    """The published checkpoints switch their windows off (``use_sliding_window``)."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {"qkv_bias": True, "sliding_window": sliding_window(self.config, index)}


class Qwen3ForCausalLM(CausalLM):
    """The config sets the head dimension: 128 for any hidden size."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            "qkv_bias": self.config.attention_bias,
            "output_bias": self.config.attention_bias,
            "sliding_window": sliding_window(self.config, index),
            **self.head_norms(),
        }


def all_heads_norms(config: Any, tp: TensorParallel) -> dict[str, AllHeadsNorm]:
    """The norms of query and key, as ``SelfAttention`` takes them."""
    counts = {"query_norm": config.num_attention_heads, "key_norm": config.num_key_value_heads}
    return {
        name: AllHeadsNorm(count, head_dim(config), config.rms_norm_eps, tp)
        for name, count in counts.items()
    }


class Olmo2ForCausalLM(LlamaForCausalLM):
    """One norm is over the heads of the query together, one over those of the key."""

    layer_class = PostNormDecoderLayer

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), **all_heads_norms(self.config, self.tp)}


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three layers with a sliding window to one without; only the latter's rotary frequencies are
    stretched."""

    def attention_options(self, index: int) -> dict[str, Any]:
        window = sliding_window(self.config, index)
        return {**super().attention_options(index), "sliding_window": window}

    def rope_layer_type(self, index: int) -> str | None:
        return self.config.layer_types[index]


class Exaone4ForCausalLM(CausalLM):
    """The 32B model has windows in three of four layers. The 1.2B model has none, and rotates in
    all layers."""

    layer_class = PostNormDecoderLayer

    def attention_options(self, index: int) -> dict[str, Any]:
        window = sliding_window(self.config, index)
        return {
            **self.head_norms(),
            "sliding_window": window,
            "rotates": self.config.sliding_window is None or window is not None,
        }


class Ernie4_5ForCausalLM(CausalLM):
    """One field of the config, ``use_bias``, sets the biases of all projections."""

    rope_interleaved = True

    def attention_options(self, index: int) -> dict[str, Any]:
        return {"qkv_bias": self.config.use_bias, "output_bias": self.config.use_bias}

    def mlp(self, index: int) -> GatedMLP:
        return self.gated_mlp(self.config.intermediate_size, bias=self.config.use_bias)


class GraniteDecoderLayer(DecoderLayer):
    """A block's output is multiplied before it joins the residual stream."""

    def __init__(self, config: Any, *blocks: Any) -> None:
        super().__init__(config, *blocks)
        self.factor = config.residual_multiplier

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = super().attend(hidden, residual, positions, context)
        return hidden * self.factor, residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual = super().feed_forward(hidden, residual)
        return hidden * self.factor, residual


class GraniteForCausalLM(LlamaForCausalLM):
    """The config has all four factors."""

    layer_class = GraniteDecoderLayer

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.embedding_scale = config.embedding_multiplier
        self.logit_divisor = config.logits_scaling

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), "scale": self.config.attention_multiplier}


_NORMS = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Its checkpoints stretch the rotary base by a fixed ``alpha``, though they call it dynamic."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            **super().attention_options(index),
            **self.head_norms(),
            "norm_after_rotation": True,
        }

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``query_layernorm`` and ``key_layernorm`` are ``q_norm`` and ``k_norm`` here, as in other
        models."""
        for theirs, ours in _NORMS.items():
            name = name.replace(theirs, ours)
        yield name, tensor


class SeedOssForCausalLM(CausalLM):
    """The config sets the output's bias apart."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            "qkv_bias": self.config.attention_bias,
            "output_bias": self.config.attention_out_bias,
        }


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """The config's ``no_rope_layers`` has a 1 for each layer that rotates, in spite of its name."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            **super().attention_options(index),
            "rotates": bool(self.config.no_rope_layers[index]),
            "sliding_window": sliding_window(self.config, index),
        }
