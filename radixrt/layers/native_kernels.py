"""The layers' operations by the native kernels of ``radixrt_kernels``: what a CPU serves with."""

import torch
from torch import nn

from radixrt.layers.matrix import DenseMatrix, Matrix
from radixrt.layers.torch_kernels import TorchKernels
from radixrt_kernels import activation, linear

_GATED = {
    "silu": activation.silu_and_mul,
    "gelu": activation.gelu_and_mul,
    "gelu_tanh": activation.gelu_tanh_and_mul,
}


class NativeKernels(TorchKernels):
    """See ``LayerKernels``. What has no native kernel is PyTorch's."""

    def gated_activation(self, name: str, gate_up: torch.Tensor) -> torch.Tensor:
        return _GATED[name](gate_up)

    def pack(self, matrix: Matrix) -> Matrix:
        if isinstance(matrix, DenseMatrix):
            return PackedMatrix(matrix)
        return matrix


class PackedMatrix(Matrix):
    """A plain matrix in the order in which the kernels read it; see ``radixrt_kernels.linear``."""

    def __init__(self, dense: DenseMatrix) -> None:
        super().__init__(dense.rows, dense.columns)
        self.weight = nn.Parameter(linear.pack(dense.weight), requires_grad=False)

    def multiply(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear.linear(hidden, self.weight, self.rows, bias)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return linear.look_up(self.weight, self.rows, self.columns, rows)
