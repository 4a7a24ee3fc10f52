"""Nemotron-H and Mamba 2 alone: one block in each layer."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from radixrt.layers.mlp import RELU_SQUARED, SquaredReluMLP, split_fused_experts
from radixrt.layers.norm import RMSNorm
from radixrt.layers.recurrent import Mamba2, Mamba2Options
from radixrt.layers.rotary import NoRotary, RotaryEmbedding
from radixrt.models.hybrids.hybrid import HybridCausalLM, SingleBlockLayer
from radixrt.models.mixtures import group_router


class Mamba2ForCausalLM(HybridCausalLM):
    """No attention, and no MLP."""

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.layer_norm_epsilon)

    def rotary(self, context_length: int, layer_type: str | None) -> RotaryEmbedding:
        return NoRotary()

    def least_dt(self) -> float:
        """The bound of the time step; transformers has another one for each of the two."""
        return float(self.config.time_step_limit[0])

    def recurrent(self, index: int) -> Mamba2:
        config = self.config
        return self._mamba(index, config.num_heads, config.head_dim, config.state_size)

    def _mamba(self, index: int, num_heads: int, head_dim: int, state_size: int) -> Mamba2:
        config = self.config
        options = Mamba2Options(
            hidden_size=config.hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            num_groups=config.n_groups,
            state_size=state_size,
            taps=config.conv_kernel,
            eps=config.layer_norm_epsilon,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
            output_bias=config.use_bias,
            dt_limit=(self.least_dt(), config.time_step_limit[1]),
        )
        return Mamba2(options, index, self.tp)

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        return SingleBlockLayer(self._block(index, rotary), self.norm(self.config.hidden_size))

    def _block(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        return self.recurrent(index)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = name.replace("backbone.", "model.", 1).replace(
            "model.embeddings.", "model.embed_tokens."
        )
        yield from super().translate(name.replace("model.norm_f.", "model.norm."), tensor)


class NemotronHForCausalLM(Mamba2ForCausalLM):
    """The config's ``layers_block_type`` says which layers have Mamba 2, attention without
    positions, an MLP or experts."""

    activation = RELU_SQUARED

    def least_dt(self) -> float:
        return float(self.config.time_step_min)

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        return {"qkv_bias": bias, "output_bias": bias, "rotates": False}

    def recurrent(self, index: int) -> Mamba2:
        config = self.config
        return self._mamba(
            index, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
        )

    def mlp(self, index: int) -> nn.Module:
        config, hidden = self.config, self.config.hidden_size
        if config.layers_block_type[index] == "mlp":
            return SquaredReluMLP(hidden, config.intermediate_size, self.tp, config.mlp_bias)
        shared_size = config.moe_shared_expert_intermediate_size
        shared = SquaredReluMLP(hidden, shared_size, self.tp, config.mlp_bias)
        return self.mixture(group_router(config), config.moe_intermediate_size, shared)

    def _block(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        kind = self.config.layers_block_type[index]
        if kind in ("mlp", "moe"):
            return self.mlp(index)
        return self.attention(index, rotary) if kind == "full_attention" else self.recurrent(index)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name.startswith("mtp."):
            return
        for inner, part in super().translate(name, tensor):
            yield from split_fused_experts(inner, part)
