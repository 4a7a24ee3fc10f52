"""The gated MLP (Shazeer, 2020) of a decoder layer."""

from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from radixrt.layers.parallel import TensorParallel

RELU_SQUARED = "relu2"
"""The activation of MLPs without a gate (Nemotron)."""
_NAMES = {
    RELU_SQUARED: RELU_SQUARED,
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "clamped_swiglu": "clamped_swiglu",
}


def gated_activation(hidden_act: str) -> str:
    """The kernel's name for a config's ``hidden_act``.

    Raises:
        ConfigError: the activation is not one that gated MLPs use here.
    """
    if hidden_act not in _NAMES:
        raise ConfigError(
            f"The checkpoint's activation {hidden_act!r} is not supported; supported: {', '.join(_NAMES)}."
        )
    return _NAMES[hidden_act]


class SquaredReluMLP(KernelLayer):
    """``down(relu(up(x))**2)`` (So et al., 2021)"""

    def __init__(self, hidden_size: int, size: int, tp: TensorParallel, bias: bool = False) -> None:
        super().__init__()
        up = [Projection.even("up_proj", size, tp)]
        self.merged_up_proj = ColumnParallelLinear(hidden_size, up, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        return self.down_proj.forward(self.merged_up_proj.forward(hidden).relu().square())


class GatedMLP(KernelLayer):
    """``down(act(gate(x)) * up(x))``"""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        tp: TensorParallel,
        *,
        activation: str,
        bias: bool = False,
    ) -> None:
        super().__init__()
        gate_up = [
            Projection.even(name, intermediate_size, tp) for name in ("gate_proj", "up_proj")
        ]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, gate_up, bias)
        self.activation = gated_activation(activation)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        gate_up = self.gate_up_proj.forward(hidden)
        return self.down_proj.forward(self.kernels.gated_activation(self.activation, gate_up))
