"""Qwen3-Next and Qwen3.5 (text): a gated delta net in three of four layers, gated attention in the
fourth, and experts in most."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.layers.mlp import Router, split_fused_experts
from radixrt.layers.norm import RMSNorm
from radixrt.layers.recurrent import GatedDeltaNet
from radixrt.models.hybrids.hybrid import HybridCausalLM


class Qwen3_5ForCausalLM(HybridCausalLM):
    """The config's ``layer_types`` says which layers have attention. The layer that predicts further
    tokens (``mtp``) is no part of it (:mod:`radixrt.models.mtp`)."""

    recurrent_name = "linear_attn"

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, unit_offset=True)

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        return {"qkv_bias": bias, "output_bias": bias, "gated": True, **self.head_norms()}

    def mlp(self, index: int) -> nn.Module:
        config, count = self.config, getattr(self.config, "num_experts", 0)
        step = getattr(config, "decoder_sparse_step", 1)
        dense = index in (getattr(config, "mlp_only_layers", None) or [])
        if count == 0 or (index + 1) % step or dense:
            return super().mlp(index)
        hidden, normalize = config.hidden_size, getattr(config, "norm_topk_prob", True)
        router = Router(hidden, count, config.num_experts_per_tok, normalize)
        shared = self.gated_mlp(config.shared_expert_intermediate_size)
        shared_gate = Router(hidden, 1, 1, normalize=False)
        return self.mixture(router, config.moe_intermediate_size, shared, shared_gate)

    def recurrent(self, index: int) -> GatedDeltaNet:
        return GatedDeltaNet(self.config, index, self.tp)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        _, is_layer, rest = name.partition("model.layers.")
        if is_layer and int(rest.partition(".")[0]) >= self.config.num_hidden_layers:
            return  # a layer that predicts further tokens, in GGUF files
        if name.startswith(("mtp.", "model.visual.")):
            return
        name = name.replace(".shared_expert.", ".shared_experts.")
        for inner, part in super().translate(name, tensor):
            yield from split_fused_experts(inner, part)


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Checkpoints have the projections of the gated delta net by key head."""

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        keys, group = (
            config.linear_key_head_dim,
            config.linear_num_value_heads // config.linear_num_key_heads,
        )
        values = group * config.linear_value_head_dim
        parts = {
            ".in_proj_qkvz.": {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,)},
            ".in_proj_ba.": {"in_proj_b": (group,), "in_proj_a": (group,)},
        }
        for merged, projections in parts.items():
            if merged not in name:
                continue
            sizes = [size for some in projections.values() for size in some]
            heads = tensor.unflatten(0, (config.linear_num_key_heads, -1))
            unit = sum(sizes) // heads.shape[1]  # a scale of a block stands for several rows
            found = iter(heads.split([size // unit for size in sizes], dim=1))
            for projection, some in projections.items():
                rows = torch.cat([next(found).flatten(0, 1) for _ in some])
                yield from super().translate(name.replace(merged, f".{projection}."), rows)
            return
        yield from super().translate(name, tensor)
