"""Bamba, Granite 4 H and Falcon-H1: Mamba 2 in most layers, or beside the attention of each."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.hf_config import head_dim
from radixrt.layers.mlp import GatedMLP, Router, split_fused_experts
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.recurrent import Mamba2
from radixrt.layers.rotary import NoRotary, RotaryEmbedding
from radixrt.models.decoder import DecoderLayer
from radixrt.models.hybrids.hybrid import HybridCausalLM, bamba_options

_NAMES = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.experts.": ".mlp.experts.",
}
_SHARED_MLP = re.compile(r"(.*)\.shared_mlp\.(input|output)_linear\.(.*)")


class BambaForCausalLM(HybridCausalLM):
    """The config says by their indices which layers have attention."""

    def is_recurrent(self, index: int) -> bool:
        return bool(self.config.layers_block_type[index] == "linear_attention")

    def recurrent(self, index: int) -> Mamba2:
        return Mamba2(bamba_options(self.config), index, self.tp)

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        return {"qkv_bias": bias, "output_bias": bias}

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        yield from super().translate(name, tensor)


class GraniteMoeHybridForCausalLM(BambaForCausalLM):
    """Granite's four factors, and in some models experts beside one that all tokens go to. Most
    have no rotary embedding."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        self.residual_factor = config.residual_multiplier
        self.rotates = config.position_embedding_type == "rope"
        super().__init__(config, tp, context_length)
        self.embedding_scale = config.embedding_multiplier
        self.logit_divisor = config.logits_scaling

    def rotary(self, context_length: int, layer_type: str | None) -> RotaryEmbedding:
        return super().rotary(context_length, layer_type) if self.rotates else NoRotary()

    def attention_options(self, index: int) -> dict[str, Any]:
        own = {"scale": self.config.attention_multiplier, "rotates": self.rotates}
        return {**super().attention_options(index), **own}

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        hidden, count = config.hidden_size, config.num_local_experts
        shared = self.gated_mlp(config.shared_intermediate_size)
        if not count:
            return shared
        router = Router(hidden, count, config.num_experts_per_tok, normalize=True)
        return self.mixture(router, config.intermediate_size, shared)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if found := _SHARED_MLP.fullmatch(name):
            layer, kind, rest = found.groups()
            mlp = f"{layer}.mlp.shared_experts" if self.config.num_local_experts else f"{layer}.mlp"
            if kind == "output":
                yield f"{mlp}.down_proj.{rest}", tensor
                return
            for projection, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{mlp}.{projection}.{rest}", rows
            return
        for inner, part in super().translate(name, tensor):
            yield from split_fused_experts(inner, part)


class ScaledMLP(GatedMLP):
    """The gate and the output are multiplied by constants (Falcon-H1)."""

    factors = (1.0, 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up_proj.forward(hidden)
        if self.factors[0] != 1.0:
            gate_up[:, : gate_up.shape[1] // 2] *= self.factors[0]
        activated = self.kernels.gated_activation(self.activation, gate_up)
        output = self.down_proj.forward(activated)
        return output if self.factors[1] == 1.0 else output * self.factors[1]


class ParallelLayer(DecoderLayer):
    """Attention and Mamba 2 read the same normed input; their outputs are added."""

    def __init__(
        self, config: Any, self_attn: AttentionBlock, mlp: nn.Module, mamba: Mamba2
    ) -> None:
        super().__init__(config, self_attn, mlp)
        self.mamba = mamba
        self.config_factors = (
            config.attention_in_multiplier,
            config.attention_out_multiplier,
            config.ssm_in_multiplier,
            config.ssm_out_multiplier,
        )

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        attention_in, attention_out, mamba_in, mamba_out = self.config_factors
        mixed = self.mamba.forward(hidden * mamba_in, positions, context) * mamba_out
        attended = self.self_attn.forward(hidden * attention_in, positions, context)
        return mixed + attended * attention_out, residual


class FalconH1ForCausalLM(BambaForCausalLM):
    """Mamba 2 beside attention in each layer, and constants that multiply almost every projection
    (Yang & Hu, 2021)."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.embedding_scale = config.embedding_multiplier
        self.logit_divisor = 1.0 / config.lm_head_multiplier

    def recurrent(self, index: int) -> Mamba2:
        config = self.config
        options = bamba_options(
            config,
            has_norm=config.mamba_rms_norm,
            gate_first=not config.mamba_norm_before_gate,
            output_bias=config.projectors_bias,
            factors=tuple(config.ssm_multipliers),
        )
        return Mamba2(options, index, self.tp)

    def attention_options(self, index: int) -> dict[str, Any]:
        scale = head_dim(self.config) ** -0.5 * self.config.key_multiplier
        return {**super().attention_options(index), "scale": scale}

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        size, act = config.intermediate_size, config.hidden_act
        mlp = ScaledMLP(config.hidden_size, size, self.tp, activation=act, bias=config.mlp_bias)
        mlp.factors = tuple(config.mlp_multipliers)
        return mlp

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        attention, mamba = self.attention(index, rotary), self.recurrent(index)
        return ParallelLayer(self.config, attention, self.mlp(index), mamba)
