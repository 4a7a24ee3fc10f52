"""The common part of models whose layers have attention or a recurrent block."""

from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.norm import RMSNorm
from radixrt.layers.recurrent import RecurrentBlock

Mixer = AttentionBlock | RecurrentBlock
"""The block of a layer that mixes tokens."""


class HybridDecoderLayer(nn.Module):
    """Llama's layer, whose mixer has the name that the checkpoint gives to its kind."""

    def __init__(
        self, name: str, mixer: Mixer, mlp: nn.Module, norms: tuple[RMSNorm, RMSNorm]
    ) -> None:
        super().__init__()
        self.mixer_name = name
        self.add_module(name, mixer)
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """See ``DecoderLayer.attend``."""
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        mixer: Any = getattr(self, self.mixer_name)
        return mixer.forward(hidden, positions, context), residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DecoderLayer.feed_forward``."""
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp.forward(hidden), residual
