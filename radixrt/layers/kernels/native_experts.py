"""The matrices of a mixture's experts in the form in which the native kernels multiply all of them in one call."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from radixrt.layers.matrix import DenseMatrix, Weights
from radixrt.layers.quantization.groupwise import GroupwiseMatrix
from radixrt_kernels import groupwise, linear


class NativeExperts(Weights, ABC):
    """A packed stack."""

    @abstractmethod
    def multiply_groups(self, hidden: Tensor, tokens: Tensor | None, starts: Tensor) -> Tensor:
        """Each row times the matrix that its group belongs to: [rows, output features of one matrix].

        Args:
            hidden: [num_tokens, columns]
            tokens: int32 [rows], which token each row is; None: the rows are those of ``hidden``.
            starts: int32 [matrices + 1], where the rows of each matrix begin.
        """


class PackedExperts(NativeExperts):
    """Plain weights; see ``radixrt_kernels.linear``."""

    def __init__(self, dense: DenseMatrix, count: int) -> None:
        super().__init__(dense.rows, dense.columns)
        self.rows_each = dense.rows // count
        packed = linear.pack_stack(dense.weight.unflatten(0, (count, -1)))
        self.weight = nn.Parameter(packed, requires_grad=False)

    def multiply_groups(self, hidden: Tensor, tokens: Tensor | None, starts: Tensor) -> Tensor:
        return linear.grouped_linear(hidden, tokens, starts, self.weight, self.rows_each)


class GroupwiseExperts(NativeExperts):
    """Codes; see ``radixrt_kernels.groupwise``."""

    def __init__(self, matrix: GroupwiseMatrix, count: int) -> None:
        super().__init__(matrix.rows, matrix.columns)
        rows = matrix.rows // count

        def pack(index: int) -> groupwise.PackedCodes:
            one = slice(index * rows, (index + 1) * rows)
            codes, scales, zeros = matrix.codes_of(one), matrix.scales[one], matrix.zeros[one]
            return groupwise.pack(codes, scales, zeros, matrix.bits, matrix.group_size)

        self.packed = groupwise.stack(pack, count)
        self.register_buffer("codes", self.packed.codes)
        self.register_buffer("scales", self.packed.scales)
        self.register_buffer("zeros", self.packed.zeros)

    def multiply_groups(self, hidden: Tensor, tokens: Tensor | None, starts: Tensor) -> Tensor:
        return groupwise.grouped_linear(hidden, tokens, starts, self.packed)
