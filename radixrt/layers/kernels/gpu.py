"""The layers' operations on an NVIDIA GPU: FlashInfer's kernels where it has them, Triton's for the
rest.

Each operation asks ``flashinfer`` first and falls to ``triton``; which shapes FlashInfer takes is
said once, in :class:`FlashInferLayers`. Either set may be left out, so that the two can be measured
against each other. Their results differ from the references', and from each other's, by one
rounding: FlashInfer rounds a norm and a gated activation once, at the end, where the references
round in the middle too.
"""

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.device.device import UntracedFunctions, load_flashinfer
from radixrt.layers.kernels.interface import Choice, LayerKernels, Stacks, among, in_halves
from radixrt.layers.lora import LoraStack
from radixrt.layers.matrix import DenseMatrix, Matrix, MatrixStack, Weights
from radixrt.layers.quantization.blocks import Mxfp4Stack
from radixrt.layers.quantization.fp8 import Fp8Matrix, ScaledFp8Matrix
from radixrt.layers.quantization.groupwise import GroupwiseMatrix, PackedGroupwiseMatrix

HALVES = (torch.bfloat16, torch.float16)

VECTOR_ELEMENTS = 8
"""FlashInfer's kernels read rows in pieces of 16 bytes."""

ROTATED_HEAD_DIMS = (64, 128, 256, 512)
"""FlashInfer's rotary kernel is compiled for these."""

DECODED_FROM_TOKENS = 256
"""From this number on the tensor cores are the limit, and a plain product of decoded weights keeps
them busier. Computed, not yet measured on a GPU."""

_ACTIVATIONS = {
    "silu": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
}


def gpu_kernels(device: torch.device) -> LayerKernels:
    """The fastest kernels that are installed, for a CUDA device.

    Raises:
        ConfigError: neither FlashInfer nor Triton is installed.
    """
    flashinfer = FlashInferLayers() if importlib.util.find_spec("flashinfer") else None
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"Triton is not installed, which the layers need on {device}: pip install 'radixrt[cuda]', "
            "or choose --device cpu."
        )
    return GpuKernels(flashinfer)


class FlashInferLayers:
    """FlashInfer's kernels, and the rule which inputs they take. Imported on first use: that takes
    seconds."""

    def __init__(self) -> None:
        self._functions: UntracedFunctions | None = None

    @property
    def flashinfer(self) -> Any:
        if self._functions is None:
            self._functions = UntracedFunctions(load_flashinfer())
        return self._functions

    def takes_rows(self, *tensors: Tensor) -> bool:
        """Rows of half precision, each of them a whole number of vectors and aligned to one.

        For no rows FlashInfer would launch an empty grid, which CUDA refuses; Triton launches none.

        Asked some times a layer, while the device waits for the host: so it reads as little of a
        tensor as it can.
        """
        if not len(tensors[0]):
            return False
        for tensor in tensors:
            if tensor.dtype not in HALVES or tensor.storage_offset() % VECTOR_ELEMENTS:
                return False
            if tensor.shape[-1] % VECTOR_ELEMENTS:
                return False
            if not tensor.is_contiguous():
                *outer, inner = tensor.stride()
                if inner != 1 or any(stride % VECTOR_ELEMENTS for stride in outer):
                    return False
        return True

    def takes_halves(self, merged: Tensor) -> bool:
        """Rows of two halves, each of which is a whole number of vectors."""
        halves_fit = merged.shape[-1] % (2 * VECTOR_ELEMENTS) == 0
        return halves_fit and merged.is_contiguous() and self.takes_rows(merged)

    def takes_rotation(self, query: Tensor, key: Tensor, cos_sin: Tensor) -> bool:
        """Heads of a size that the kernel was compiled for, half of whose rotated part is whole
        vectors."""
        head_dim = query.shape[-1]
        return (
            head_dim in ROTATED_HEAD_DIMS
            and key.shape[1] > 0
            and query.stride(1) == key.stride(1) == head_dim  # so that heads flatten without a copy
            and cos_sin.shape[1] // 2 % VECTOR_ELEMENTS == 0
            and self.takes_rows(query, key)
        )


class GpuKernels(LayerKernels):
    """See ``LayerKernels``."""

    is_taped = False
    multiplies_quantized_experts = False

    def __init__(self, flashinfer: FlashInferLayers | None) -> None:
        """
        Args:
            flashinfer: None: Triton computes everything.
        """
        from radixrt_kernels.triton import activation, lora, moe, norm, rotary

        self._flashinfer = flashinfer
        self._norm, self._rotary = norm, rotary
        self._activation, self._moe = activation, moe
        self.lora = lora

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        ours = self._flashinfer
        if ours is not None and ours.takes_rows(hidden) and not (unit_offset and hidden.dim() == 3):
            kernels = ours.flashinfer
            norm = kernels.gemma_rmsnorm if unit_offset else kernels.rmsnorm
            return norm(hidden, weight, eps)
        return self._norm.rms_norm(hidden, weight, eps, unit_offset)

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        ours = self._flashinfer
        if ours is not None and ours.takes_rows(hidden, residual):
            kernels = ours.flashinfer
            add = kernels.gemma_fused_add_rmsnorm if unit_offset else kernels.fused_add_rmsnorm
            add(hidden, residual, weight, eps)
            return hidden, residual
        return self._norm.add_rms_norm(hidden, residual, weight, eps, unit_offset)

    def rotate(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if interleaved:
            query, key = in_halves(query), in_halves(key)
        ours = self._flashinfer
        if ours is not None and ours.takes_rotation(query, key, cos_sin):
            ours.flashinfer.apply_rope_with_cos_sin_cache_inplace(
                positions, query.flatten(1), key.flatten(1), query.shape[-1], cos_sin, is_neox=True
            )
            return query, key
        return self._rotary.rotate(positions, query, key, cos_sin)

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        ours = self._flashinfer
        if ours is not None and name in _ACTIVATIONS and ours.takes_halves(gate_up):
            return getattr(ours.flashinfer, _ACTIVATIONS[name])(gate_up)
        return self._activation.gated_activation(name, gate_up)

    def experts(
        self,
        hidden: Tensor,
        choice: Choice,
        stacks: Stacks,
        activation: str,
        *,
        is_part: bool = False,
    ) -> Tensor:
        gate_up, down = stacks
        weights, biases = (_weights_of(gate_up), _weights_of(down)), (gate_up.bias, down.bias)
        adapters = None
        if gate_up.lora is not None or down.lora is not None:
            experts = among(choice[1], gate_up.count)
            adapters = partial(_adapt, gate_up.lora, experts), partial(_adapt, down.lora, experts)
        return self._moe.experts_mlp(
            hidden, *choice, *weights, activation, biases, is_part, adapters
        )

    def pack(self, matrix: Matrix) -> Matrix:
        if isinstance(matrix, GroupwiseMatrix) and TritonGroupwiseMatrix.takes(matrix):
            return TritonGroupwiseMatrix(matrix)
        if isinstance(matrix, Fp8Matrix) and ScaledFp8Matrix.takes(matrix):
            return ScaledFp8Matrix(matrix)
        return matrix  # cuBLAS takes plain weights as checkpoints have them

    def pack_stack(self, matrix: Matrix, count: int) -> Weights:
        return matrix.dequantized() if isinstance(matrix, Mxfp4Stack) else matrix


def _adapt(
    lora: LoraStack | None,
    experts: Tensor,
    hidden: Tensor,
    output: Tensor,
    factors: Tensor | None,
) -> None:
    if lora is not None:
        lora.add_by_member(hidden, output, experts, factors=factors)


def _weights_of(stack: MatrixStack) -> Tensor:
    """[count, rows, columns]"""
    assert isinstance(stack.matrix, DenseMatrix)  # no other stacks are loaded for a GPU
    return stack.matrix.weight.unflatten(0, (stack.count, -1))


class TritonGroupwiseMatrix(PackedGroupwiseMatrix):
    """A groupwise quantized matrix: decoded inside the product for few tokens, to memory before it
    for many. See ``radixrt_kernels.triton.groupwise``."""

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
