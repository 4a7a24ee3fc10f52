"""The common part of models whose layers have attention or a recurrent block."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.norm import RMSNorm
from radixrt.layers.recurrent import Mamba2Options, RecurrentBlock
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.decoder import CausalLM

Mixer = AttentionBlock | RecurrentBlock
"""The block of a layer that mixes tokens."""


class HybridDecoderLayer(nn.Module):
    """Llama's layer, whose mixer has the name that the checkpoint gives to its kind."""

    def __init__(
        self, name: str, mixer: Mixer, mlp: nn.Module, norms: list[RMSNorm], factor: float = 1.0
    ) -> None:
        """
        Args:
            norms: before the mixer and before the MLP.
            factor: of the blocks' outputs, before they join the residual stream (Granite).
        """
        super().__init__()
        self.mixer_name = name
        self.add_module(name, mixer)
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms
        self.factor = factor

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        mixer: Any = getattr(self, self.mixer_name)
        hidden = mixer.forward(hidden, positions, context)
        return hidden if self.factor == 1.0 else hidden * self.factor, residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        hidden = self.mlp.forward(hidden)
        return hidden if self.factor == 1.0 else hidden * self.factor, residual


class SingleBlockLayer(nn.Module):
    """A layer with a mixer or an MLP, behind a norm (Mamba 2, Nemotron-H)."""

    def __init__(self, block: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.mixer: Any = block
        self.norm = norm
        self.mixes = isinstance(block, Mixer)

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        if not self.mixes:
            return hidden, residual
        hidden, residual = self.norm.add_and_norm(hidden, residual)
        return self.mixer.forward(hidden, positions, context), residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.mixes:
            return hidden, residual
        hidden, residual = self.norm.add_and_norm(hidden, residual)
        return self.mixer.forward(hidden), residual


class HybridCausalLM(CausalLM):
    """A decoder with a recurrent block in some layers."""

    recurrent_name = "mamba"
    """Name of the recurrent block in a layer of the checkpoint."""
    residual_factor = 1.0
    """See :class:`HybridDecoderLayer`."""

    def is_recurrent(self, index: int) -> bool:
        """Whether layer ``index`` has the recurrent block, and no attention."""
        return bool(self.config.layer_types[index] == "linear_attention")

    @abstractmethod
    def recurrent(self, index: int) -> RecurrentBlock:
        """The recurrent block of layer ``index``."""

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        norms = [self.norm(self.config.hidden_size) for _ in range(2)]
        name, mixer = self._mixer(index, rotary)
        return HybridDecoderLayer(name, mixer, self.mlp(index), norms, self.residual_factor)

    def _mixer(self, index: int, rotary: RotaryEmbedding) -> tuple[str, Mixer]:
        if self.is_recurrent(index):
            return self.recurrent_name, self.recurrent(index)
        return "self_attn", self.attention(index, rotary)


def bamba_options(config: Any, **others: Any) -> Mamba2Options:
    """The sizes of a Mamba 2 block in the names of Bamba's config, which Granite and Falcon
    share."""
    return Mamba2Options(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        taps=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        conv_bias=config.mamba_conv_bias,
        bias=config.mamba_proj_bias,
        output_bias=others.pop("output_bias", config.mamba_proj_bias),
        dt_limit=tuple(config.time_step_limit),
        **others,
    )
