"""Weights and activations of 8-bit floats (Micikevicius et al., 2022): W8A8 in E4M3.

Each output feature has a scale, and each token gets one at run time: a product of two 8-bit floats
runs at twice the rate of bfloat16, and reads half the bytes.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.layers.matrix import LoadableMatrix, Matrix, Placement
from radixrt.layers.quantization.scheme import QuantizationScheme
from radixrt.layers.weights import WeightSlot

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-12

ALIGNMENT = 16
"""Rows and columns of the GPU's product are multiples of it."""


class Fp8Matrix(Matrix):
    """``weight[row, column] = codes[row, column] * scales[row]``; the reference of the products, on
    any device.

    ``codes`` is float8_e4m3fn [rows, columns], ``scales`` float32 [rows].
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, scheme: QuantizationScheme) -> None:
        super().__init__(rows, columns)
        self.scheme = scheme
        self.register_buffer("codes", torch.zeros(rows, columns, dtype=FP8))
        self.register_buffer("scales", torch.ones(rows, dtype=torch.float32))

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        codes, scales = quantize_rows(hidden)
        product = F.linear(codes.float(), self.codes.float()) * scales * self.scales
        if bias is not None:
            product += bias
        return product.to(hidden.dtype)


def quantize_rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> float8_e4m3fn alike, and the scale of each row [rows, 1] float32."""
    exact = numbers.float()
    scales = (exact.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (exact / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


class RoundedFp8Matrix(Fp8Matrix, LoadableMatrix):
    """In the checkpoint: the plain ``weight`` [output features, input features], rounded while it
    is loaded."""

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        slot = WeightSlot(
            placement.size,
            self.codes[placement.rows],
            placement.dim,
            placement.start,
            store=partial(self._round, placement.rows),
        )
        yield f"{placement.name}.weight", slot

    def _round(self, rows: slice, weight: Tensor) -> None:
        """Fill ``rows``; a rank that keeps a part of the columns scales by that part."""
        codes, scales = quantize_rows(weight.to(self.codes.device))
        self.codes[rows], self.scales[rows] = codes, scales.squeeze(-1)


class StoredFp8Matrix(Fp8Matrix, LoadableMatrix):
    """In the checkpoint: ``weight`` in float8_e4m3fn and ``weight_scale``, for each projection one
    number or one an output feature. Its ``input_scale``, where activations were calibrated, is not
    used: a scale of each token's own is more exact."""

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        rows, name = placement.rows, placement.name
        codes, scales = self.codes[rows], self.scales[rows]
        yield f"{name}.weight", WeightSlot(placement.size, codes, placement.dim, placement.start)
        outputs = placement.size[0]
        shape = (outputs, 1) if self.scheme.scale_a_row else self.scheme.number_shape
        yield (
            f"{name}.weight_scale",
            WeightSlot(
                shape,
                scales,
                0,
                placement.start if placement.dim == 0 else 0,
                convert=lambda scale: scale.reshape(-1).expand(outputs),
                weights_an_element=0,
            ),
        )
        if self.scheme.input_scales:
            unused = torch.empty(1, device=self.scales.device)
            yield (
                f"{name}.input_scale",
                WeightSlot(
                    self.scheme.number_shape,
                    unused,
                    convert=lambda scale: scale.reshape(-1),
                    weights_an_element=0,
                ),
            )


class ScaledFp8Matrix(Matrix):
    """A loaded matrix on a GPU that multiplies 8-bit floats: Ada, Hopper and later."""

    def __init__(self, matrix: Fp8Matrix) -> None:
        from radixrt_kernels.triton.fp8 import quantize_rows

        super().__init__(matrix.rows, matrix.columns)
        self._quantize_rows = quantize_rows
        self.register_buffer("codes", matrix.codes)
        self.register_buffer("scales", matrix.scales.unsqueeze(0))
        self.codes: Tensor
        self.scales: Tensor

    @staticmethod
    def takes(matrix: Fp8Matrix) -> bool:
        """Whether its sizes are multiples of ``ALIGNMENT``, on a GPU that multiplies 8-bit
        floats."""
        if matrix.rows % ALIGNMENT or matrix.columns % ALIGNMENT:
            return False
        device = matrix.codes.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        codes, scales = self._quantize_rows(hidden)
        # Scales a row and a column: torch gives the result in bfloat16 alone.
        product = torch._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales, out_dtype=torch.bfloat16
        )
        if bias is not None:
            product += bias
        return product.to(hidden.dtype)
