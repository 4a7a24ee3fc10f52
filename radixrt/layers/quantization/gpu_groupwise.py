"""A groupwise quantized matrix on a GPU: decoded inside the product for few tokens, to memory before it for many."""

import torch.nn.functional as F
from torch import Tensor

from radixrt.layers.quantization.groupwise import GroupwiseMatrix, PackedGroupwiseMatrix

DECODED_FROM_TOKENS = 256
"""From this number on the tensor cores are the limit, and a plain product of decoded weights keeps them busier. Computed,
not yet measured on a GPU."""


class TritonGroupwiseMatrix(PackedGroupwiseMatrix):
    """See ``radixrt_kernels.triton.groupwise``."""

    def __init__(self, matrix: GroupwiseMatrix) -> None:
        from radixrt_kernels.triton import groupwise

        super().__init__(matrix, groupwise.pack)
        self._kernels = groupwise

    @staticmethod
    def takes(matrix: GroupwiseMatrix) -> bool:
        """Whether its groups are large enough for the kernels."""
        from radixrt_kernels.triton.groupwise import half_of

        return half_of(matrix.columns, matrix.group_size) is not None

    def multiply_packed(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if len(hidden) >= DECODED_FROM_TOKENS:
            return F.linear(hidden, self._kernels.dequantize(self.packed, self.dtype), bias)
        return self._kernels.linear(hidden, self.packed, bias)

    def look_up(self, rows: Tensor) -> Tensor:
        assert self.packed.bits == 8, "an embedding has 8 bits"
        of_rows = (of_all[rows] for of_all in (self.packed.scales, self.packed.zeros))
        scales, zeros = (
            of_groups.float().repeat_interleave(self.packed.group_size, dim=1)[:, : self.columns]
            for of_groups in of_rows
        )
        return ((self.packed.codes[rows].float() - zeros) * scales).to(self.dtype)
