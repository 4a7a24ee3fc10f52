"""The common part of models whose layers have attention or a recurrent block."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.base.errors import ConfigError
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

    @cached_property
    def _fused(self) -> tuple[str, dict[str, int]] | None:
        """See :class:`RecurrentBlock`; the blocks of all layers are alike."""
        blocks = (module for module in self.modules() if isinstance(module, RecurrentBlock))
        return next(blocks).fused

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Where ranks split the recurrent blocks, the tensors of their fused projection are cut
        into its parts."""
        if self._fused is None or f".{self._fused[0]}." not in name:
            yield name, tensor
            return
        fused, sizes = self._fused
        for part, rows in zip(sizes, _cut(name, tensor, list(sizes.values())), strict=True):
            yield name.replace(f".{fused}.", f".{part}."), rows

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        return self._layer_with(*self._mixer(index, rotary), index)

    def _layer_around(self, attention: AttentionBlock, index: int) -> nn.Module:
        return self._layer_with("self_attn", attention, index)

    def _layer_with(self, name: str, mixer: Mixer, index: int) -> nn.Module:
        norms = [self.norm(self.config.hidden_size) for _ in range(2)]
        return HybridDecoderLayer(name, mixer, self.mlp(index), norms, self.residual_factor)

    def _mixer(self, index: int, rotary: RotaryEmbedding) -> tuple[str, Mixer]:
        if self.is_recurrent(index):
            return self.recurrent_name, self.recurrent(index)
        return "self_attn", self.attention(index, rotary)


def _cut(name: str, tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of projections of ``sizes`` that a checkpoint has in one tensor, or one scale for all
    of them.

    Raises:
        ConfigError: rows of several projections share a scale.
    """
    if tensor.dim() == 0:
        return [tensor] * len(sizes)
    unit = sum(sizes) // len(tensor)  # a scale of a block stands for several rows
    if any(size % unit for size in sizes):
        raise ConfigError(
            f"In {name}, rows of several projections share a scale, so that --tp cannot split them; "
            f"use --tp 1."
        )
    return tensor.split([size // unit for size in sizes])


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
