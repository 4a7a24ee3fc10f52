"""The gated MLP (Shazeer, 2020) of a decoder layer."""

from torch import Tensor

from radixrt.layers.activation import gated_activation
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from radixrt.layers.parallel import TensorParallel


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
