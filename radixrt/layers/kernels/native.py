"""The layers' operations on a CPU, by the native kernels of ``radixrt_kernels``."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from radixrt.layers.kernels.interface import Choice, LayerKernels, Stacks, among
from radixrt.layers.lora import LoraKernels
from radixrt.layers.matrix import DenseMatrix, EmbeddingMatrix, HeadMatrices, Matrix, Weights
from radixrt.layers.quantization.blocks import BlockStack, MixedStack
from radixrt.layers.quantization.groupwise import GroupwiseMatrix, PackedGroupwiseMatrix
from radixrt_kernels import (
    activation,
    blockwise,
    groupwise,
    linear,
    mixture,
    norm,
    recurrence,
    rotary,
)
from radixrt_kernels import lora as lora_kernels


class NativeKernels(LayerKernels):
    """See ``LayerKernels``. Operations without a native kernel are PyTorch's."""

    multiplies_blocks = True
    recurrence = recurrence
    lora: LoraKernels = lora_kernels

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        return norm.rms_norm(hidden, weight, eps, unit_offset)

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        norm.add_rms_norm_(hidden, residual, weight, eps, unit_offset)
        return hidden, residual

    def rotate(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rotary.rotate_(positions, query, key, cos_sin, interleaved)
        return query, key

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        if name == "relu2":
            return super().gated_activation(name, gate_up)
        return activation.gated_activation(gate_up, name)

    def sigmoid_gate(self, gate: Tensor, values: Tensor | None = None) -> Tensor:
        return activation.sigmoid_gate(gate, values)

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        return activation.soft_cap_(logits, cap)

    def choose_experts(self, logits: Tensor, top_k: int, *, normalize: bool) -> Choice:
        return mixture.choose_experts(logits, top_k, normalize)

    def experts(
        self,
        hidden: Tensor,
        choice: Choice,
        stacks: Stacks,
        activation: str,
        *,
        is_part: bool = False,
    ) -> Tensor:
        (weights, experts), (gate_up, down) = choice, stacks
        if not isinstance(gate_up.matrix, NativeExperts) or not isinstance(
            down.matrix, NativeExperts
        ):
            return super().experts(hidden, choice, stacks, activation, is_part=is_part)
        count = gate_up.count
        if is_part:
            experts = among(experts, count)
            groups = mixture.group_by_expert(experts, count + 1).first(count)
        else:
            groups = mixture.group_by_expert(experts, count)
        rows = Rows(hidden, groups.tokens, groups.starts)
        merged = gate_up.matrix.multiply_groups(rows, gate_up.bias)
        if gate_up.lora is not None:
            gate_up.lora.add_by_member(hidden[groups.tokens], merged, experts, groups.places)
        activated = self.gated_activation(activation, merged)
        rows, outputs = Rows(activated, None, groups.starts), None
        if is_part:  # choices of other experts have their places in the last row
            outputs = hidden.new_zeros(len(activated) + 1, hidden.shape[1])
            down.matrix.multiply_groups(rows, down.bias, outputs[:-1])
        else:
            outputs = down.matrix.multiply_groups(rows, down.bias)
        if down.lora is not None:
            down.lora.add_by_member(activated, outputs[: len(activated)], experts, groups.places)
        return mixture.weighted_sum(outputs, groups.places, weights)

    def pack(self, matrix: Matrix) -> Matrix:
        if isinstance(matrix, DenseMatrix):
            return PackedMatrix(matrix)
        if isinstance(matrix, GroupwiseMatrix):
            return NativeGroupwiseMatrix(matrix)
        return matrix

    def pack_heads(self, weight: Tensor) -> HeadMatrices:
        return PackedHeads(weight)

    def pack_stack(self, matrix: Matrix, count: int) -> Weights:
        if isinstance(matrix, DenseMatrix):
            return PackedExperts(matrix, count)
        if isinstance(matrix, GroupwiseMatrix):
            return GroupwiseExperts(matrix, count)
        if isinstance(matrix, BlockStack):
            return BlockExperts(matrix, count)
        if isinstance(matrix, MixedStack):
            return MixedExperts(matrix, count, self)
        return matrix


class PackedMatrix(EmbeddingMatrix):
    """A plain matrix in the order in which the kernels read it; see ``radixrt_kernels.linear``."""

    def __init__(self, dense: DenseMatrix) -> None:
        super().__init__(dense.rows, dense.columns)
        self.weight = nn.Parameter(linear.pack(dense.weight), requires_grad=False)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return linear.linear(hidden, self.weight, self.rows, bias)

    def scores(self, hidden: Tensor) -> Tensor:
        return linear.linear(hidden, self.weight, self.rows, output_dtype=torch.float32)

    def look_up(self, rows: Tensor) -> Tensor:
        return linear.look_up(self.weight, self.rows, self.columns, rows)


class PackedHeads(HeadMatrices):
    """See ``radixrt_kernels.linear``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.weight = nn.Parameter(linear.pack_stack(weight), requires_grad=False)

    def multiply(self, hidden: Tensor, output: Tensor) -> None:
        linear.linear_by_head(hidden, self.weight, self.rows, output)


class NativeGroupwiseMatrix(PackedGroupwiseMatrix):
    """See ``radixrt_kernels.groupwise``."""

    def __init__(self, matrix: GroupwiseMatrix) -> None:
        super().__init__(matrix, groupwise.pack)

    def multiply_packed(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return groupwise.linear(hidden, self.packed, bias)

    def scores(self, hidden: Tensor) -> Tensor:
        return groupwise.linear(self.in_order(hidden), self.packed, output_dtype=torch.float32)

    def look_up(self, rows: Tensor) -> Tensor:
        return groupwise.look_up(self.packed, rows, self.dtype)

    def replace(self, places: Tensor, rows: GroupwiseMatrix) -> None:
        """Put rows of 8 bits in place of those of ``places``, int64 [rows.rows]."""
        groupwise.replace_rows(self.packed, places, rows.codes, rows.scales, rows.zeros)


class Rows(NamedTuple):
    """The rows that are multiplied, grouped by the matrix that each belongs to."""

    hidden: Tensor  # [num_tokens, columns]
    tokens: (
        Tensor | None
    )  # int32 [rows], which token each is; None: the rows are those of ``hidden``
    starts: Tensor  # int32 [matrices + 1], where the rows of each matrix begin


Bias = Tensor | None


class NativeExperts(Weights, ABC):
    """The matrices of a mixture's experts, packed so that the kernels multiply by all of them in
    one call."""

    @abstractmethod
    def multiply_groups(self, rows: Rows, bias: Bias, output: Tensor | None = None) -> Tensor:
        """Each row times the matrix that its group belongs to: [rows, output features of one
        matrix].

        Args:
            bias: [matrices, output features of one], or None.
            output: the result is written there; None: it is allocated.
        """


class PackedExperts(NativeExperts):
    """Plain weights; see ``radixrt_kernels.linear``."""

    def __init__(self, dense: DenseMatrix, count: int) -> None:
        super().__init__(dense.rows, dense.columns)
        self.rows_each = dense.rows // count
        packed = linear.pack_stack(dense.weight.unflatten(0, (count, -1)))
        self.weight = nn.Parameter(packed, requires_grad=False)

    def multiply_groups(self, rows: Rows, bias: Bias, output: Tensor | None = None) -> Tensor:
        return linear.grouped_linear(*rows, self.weight, self.rows_each, bias, output)


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

    def multiply_groups(self, rows: Rows, bias: Bias, output: Tensor | None = None) -> Tensor:
        return groupwise.grouped_linear(*rows, self.packed, bias, output)


class BlockExperts(NativeExperts):
    """Blocks of GGUF files; see ``radixrt_kernels.blockwise``."""

    def __init__(self, matrix: BlockStack, count: int) -> None:
        super().__init__(matrix.rows, matrix.columns)
        blocks = matrix.blocks.unflatten(0, (count, -1))
        self.packed = blockwise.pack_stack(blocks, matrix.kind, matrix.columns)
        self.register_buffer("codes", self.packed.packed)

    def multiply_groups(self, rows: Rows, bias: Bias, output: Tensor | None = None) -> Tensor:
        return blockwise.grouped_linear(*rows, self.packed, bias, output)


class MixedExperts(NativeExperts):
    """Matrices of parts, whose outputs are side by side."""

    def __init__(self, matrix: MixedStack, count: int, kernels: NativeKernels) -> None:
        super().__init__(matrix.rows, matrix.columns)
        self.rows_each = matrix.rows // count
        self.parts: list[NativeExperts] = []
        for index, part in enumerate(matrix.parts):
            packed = kernels.pack_stack(part, count)
            assert isinstance(packed, NativeExperts)
            self.parts.append(packed)
            self.add_module(f"part{index}", packed)

    def multiply_groups(self, rows: Rows, bias: Bias, output: Tensor | None = None) -> Tensor:
        size = self.rows_each // len(self.parts)
        if output is None:
            count = len(rows.hidden if rows.tokens is None else rows.tokens)
            output = rows.hidden.new_empty(count, self.rows_each)
        for index, part in enumerate(self.parts):
            columns = slice(index * size, (index + 1) * size)
            own = None if bias is None else bias[:, columns].contiguous()
            part.multiply_groups(rows, own, output[:, columns])
        return output
