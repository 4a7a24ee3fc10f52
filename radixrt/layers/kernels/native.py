"""The layers' operations by the native kernels of ``radixrt_kernels``: what a CPU serves with."""

from torch import Tensor, nn

from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.kernels.native_experts import GroupwiseExperts, NativeExperts, PackedExperts
from radixrt.layers.matrix import DenseMatrix, EmbeddingMatrix, Matrix, MatrixStack, Weights
from radixrt.layers.quantization.groupwise import GroupwiseMatrix, PackedGroupwiseMatrix
from radixrt_kernels import activation, groupwise, linear, mixture, norm, rotary


class NativeKernels(LayerKernels):
    """See ``LayerKernels``. What has no native kernel is PyTorch's."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        return norm.rms_norm(hidden, weight, eps, unit_offset)

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        norm.add_rms_norm_(hidden, residual, weight, eps, unit_offset)
        return hidden, residual

    def rotate(
        self, positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        rotary.rotate_(positions, query, key, cos_sin)
        return query, key

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        return activation.gated_activation(gate_up, name)

    def choose_experts(
        self, logits: Tensor, top_k: int, *, normalize: bool
    ) -> tuple[Tensor, Tensor]:
        return mixture.choose_experts(logits, top_k, normalize)

    def experts(
        self,
        hidden: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up: MatrixStack,
        down: MatrixStack,
        activation: str,
    ) -> Tensor:
        if not isinstance(gate_up.matrix, NativeExperts) or not isinstance(
            down.matrix, NativeExperts
        ):
            return super().experts(hidden, weights, experts, gate_up, down, activation)
        groups = mixture.group_by_expert(experts, gate_up.count)
        merged = gate_up.matrix.multiply_groups(hidden, groups.tokens, groups.starts)
        activated = self.gated_activation(activation, merged)
        outputs = down.matrix.multiply_groups(activated, None, groups.starts)
        return mixture.weighted_sum(outputs, groups.places, weights)

    def pack(self, matrix: Matrix) -> Matrix:
        if isinstance(matrix, DenseMatrix):
            return PackedMatrix(matrix)
        if isinstance(matrix, GroupwiseMatrix):
            return NativeGroupwiseMatrix(matrix)
        return matrix

    def pack_stack(self, matrix: Matrix, count: int) -> Weights:
        if isinstance(matrix, DenseMatrix):
            return PackedExperts(matrix, count)
        if isinstance(matrix, GroupwiseMatrix):
            return GroupwiseExperts(matrix, count)
        return matrix


class PackedMatrix(EmbeddingMatrix):
    """A plain matrix in the order in which the kernels read it; see ``radixrt_kernels.linear``."""

    def __init__(self, dense: DenseMatrix) -> None:
        super().__init__(dense.rows, dense.columns)
        self.weight = nn.Parameter(linear.pack(dense.weight), requires_grad=False)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return linear.linear(hidden, self.weight, self.rows, bias)

    def look_up(self, rows: Tensor) -> Tensor:
        return linear.look_up(self.weight, self.rows, self.columns, rows)


class NativeGroupwiseMatrix(PackedGroupwiseMatrix):
    """See ``radixrt_kernels.groupwise``."""

    def __init__(self, matrix: GroupwiseMatrix) -> None:
        super().__init__(matrix, groupwise.pack)

    def multiply_packed(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return groupwise.linear(hidden, self.packed, bias)

    def look_up(self, rows: Tensor) -> Tensor:
        return groupwise.look_up(self.packed, rows, self.dtype)
