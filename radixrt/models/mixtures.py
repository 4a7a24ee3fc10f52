"""The architectures with a mixture of experts in the place of the MLPs."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.hf_config import sliding_window
from radixrt.layers.kernels.interface import SWIGLU_ALPHA, SWIGLU_LIMIT
from radixrt.layers.latent_attention import LatentAttention
from radixrt.layers.mlp import (
    Router,
    SigmoidRouter,
    SoftmaxGroupRouter,
    SparseMoE,
    split_fused_experts,
)
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.decoder import CausalLM
from radixrt.models.dense import MistralForCausalLM, Qwen3ForCausalLM, all_heads_norms

_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MixtralForCausalLM(MistralForCausalLM):
    """Each token goes to two experts, whose weights are scaled to sum to one."""

    router_class: type[Router] = Router

    def mlp(self, index: int) -> SparseMoE:
        config = self.config
        hidden, count, top_k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok  # fmt: skip
        router = self.router_class(hidden, count, top_k, normalize=True)
        return self.mixture(router, config.intermediate_size)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``block_sparse_moe.experts.0.w1`` is ``mlp.experts.0.gate_proj`` here, as in other
        models."""
        name = name.replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"\.(w[123])\.", lambda w: f".{_PROJECTIONS[w[1]]}.", name)
        yield from split_fused_experts(name, tensor)


_BIAS = ".e_score_correction_bias"


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    """Its checkpoints name the experts as Mixtral's do."""

    router_class = SigmoidRouter

    def attention_options(self, index: int) -> dict[str, Any]:
        return all_heads_norms(self.config, self.tp)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The bias of the choice is the router's here."""
        if name.endswith(_BIAS):
            name = f"{name.removesuffix(_BIAS).removesuffix('.gate')}.gate{_BIAS}"
        yield from super().translate(name, tensor)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Which layers have experts is the config's choice: ``mlp_only_layers``,
    ``decoder_sparse_step``."""

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        hidden, count = config.hidden_size, config.num_experts
        is_sparse = count > 0 and (index + 1) % config.decoder_sparse_step == 0
        if not is_sparse or index in (config.mlp_only_layers or []):
            return super().mlp(index)
        normalize = getattr(config, "norm_topk_prob", True)  # Qwen3-VL has no such choice
        router = Router(hidden, count, config.num_experts_per_tok, normalize=normalize)
        return self.mixture(router, config.moe_intermediate_size)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from split_fused_experts(name, tensor)


def group_router(config: Any) -> SigmoidRouter:
    """The router of a config that has DeepSeek V3's fields."""
    return SigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        factor=config.routed_scaling_factor,
    )


class Glm4MoeForCausalLM(CausalLM):
    """The first layers have a dense MLP. The layers behind the last, which predict further tokens,
    are no part of it (:mod:`radixrt.models.mtp`)."""

    def attention_options(self, index: int) -> dict[str, Any]:
        norms = self.head_norms() if self.config.use_qk_norm else {}
        return {"qkv_bias": self.config.attention_bias, **norms}

    def is_dense(self, index: int) -> bool:
        """Whether a layer has no experts."""
        return bool(index < self.config.first_k_dense_replace)

    def router(self) -> SigmoidRouter:
        return group_router(self.config)

    def mlp(self, index: int) -> nn.Module:
        if self.is_dense(index):
            return super().mlp(index)
        size, num_shared = self.config.moe_intermediate_size, self.config.n_shared_experts
        shared = [self.gated_mlp(size * num_shared)] if num_shared else []
        return self.mixture(self.router(), size, *shared)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        _, is_layer, rest = name.partition("model.layers.")
        if is_layer and int(rest.partition(".")[0]) >= self.config.num_hidden_layers:
            return
        yield from split_fused_experts(name, tensor)


class DeepseekV3ForCausalLM(Glm4MoeForCausalLM):
    """Also R1 and Moonlight."""

    def attention(self, index: int, rotary: RotaryEmbedding) -> AttentionBlock:
        return LatentAttention(self.config, index, rotary, self.tp)

    def rotary(self, context_length: int, layer_type: str | None) -> RotaryEmbedding:
        interleaved = getattr(self.config, "rope_interleave", True)
        return RotaryEmbedding(self.config, context_length, layer_type, interleaved, by_parts=True)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    def is_dense(self, index: int) -> bool:
        dense: bool = self.config.mlp_layer_types[index] == "dense"
        return dense


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """Experts are weighted by a softmax over all of them; there is no bias."""

    def router(self) -> SigmoidRouter:
        config: Any = self.config
        grouped = config.topk_method == "group_limited_greedy"
        return SoftmaxGroupRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            normalize=False,
            num_groups=config.n_group if grouped else 1,
            top_groups=config.topk_group if grouped else 1,
            factor=config.routed_scaling_factor,
        )


_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(\w+_proj)(?:[._](weight|bias|blocks|scales))?")


class GptOssForCausalLM(CausalLM):
    """The experts are plain, or in MXFP4."""

    has_transposed_experts = True
    activation = "clamped_swiglu"

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        window = sliding_window(self.config, index)
        return {
            "qkv_bias": bias,
            "output_bias": bias,
            "sliding_window": window,
            "has_sinks": True,
        }

    def mlp(self, index: int) -> SparseMoE:
        config = self.config
        if (config.swiglu_alpha, config.swiglu_limit) != (SWIGLU_ALPHA, SWIGLU_LIMIT):
            raise ConfigError(
                f"The checkpoint's config.json has swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit}; "
                f"{SWIGLU_ALPHA} and {SWIGLU_LIMIT} are supported."
            )
        hidden, count = config.hidden_size, config.num_local_experts
        router = Router(hidden, count, config.num_experts_per_tok, normalize=True, bias=True)
        return self.mixture(router, config.intermediate_size, bias=True)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint has all experts in one tensor, plain ones with input features first. Rows
        of gate and up alternate."""
        name = name.replace(".mlp.router.", ".mlp.gate.")
        if (found := _EXPERTS.fullmatch(name)) is None:
            yield name, tensor
            return
        path, projection, kind = found.groups()
        if kind is None:
            tensor = tensor.transpose(1, 2)
        names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        for expert, part in enumerate(tensor):
            for first, each in enumerate(names):
                yield f"{path}.{expert}.{each}.{kind or 'weight'}", part[first :: len(names)]
