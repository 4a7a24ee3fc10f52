"""Chooses the format of each matrix of a model."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.matrix import DenseMatrix, LoadableMatrix, MatrixFormat
from radixrt.layers.mlp import Experts
from radixrt.layers.quantization.blocks import Mxfp4Stack
from radixrt.layers.quantization.fp8 import RoundedFp8Matrix, StoredFp8Matrix
from radixrt.layers.quantization.groupwise import AwqMatrix, GptqMatrix, RoundedMatrix
from radixrt.layers.quantization.scheme import DEFAULT_GROUP_SIZE, HEAD_BITS, QuantizationScheme

_FORMATS: dict[str, Callable[..., LoadableMatrix]] = {
    "awq": AwqMatrix,
    "gptq": GptqMatrix,
    "mxfp4": Mxfp4Stack,
    "rounding": RoundedMatrix,
    "fp8": StoredFp8Matrix,
    "fp8_rounding": RoundedFp8Matrix,
}
"""Makers of matrices by method, from rows, columns and scheme."""
_EMBEDDING = "embed_tokens"
_LAYER_INPUTS = "embed_tokens_per_layer"
_HEAD = "lm_head"
_ABSORBED = "kv_b_proj"
"""Latent attention multiplies queries and results by its parts, which are plain."""


def matrix_formats(
    scheme: QuantizationScheme | None, *, tied_head: bool
) -> Callable[[str, Sequence[str]], MatrixFormat]:
    """The format of a matrix by its layer's path in the model and the checkpoint's projections in
    it.

    Args:
        scheme: None: plain weights.
        tied_head: the embedding is the LM head too.
    """

    def format_of(path: str, projections: Sequence[str]) -> MatrixFormat:
        if scheme is None or (scheme.experts_only and not scheme.covers(path)):
            return DenseMatrix
        last = path.rpartition(".")[2]
        if last in (_HEAD, _LAYER_INPUTS) or (last == _EMBEDDING and tied_head):
            return _head_format(scheme, path)
        if last == _ABSORBED and scheme.method == "rounding":
            return DenseMatrix  # decoded when it is packed: rounding it would save nothing
        if last == _EMBEDDING or not scheme.covers(path, projections):
            return DenseMatrix
        return _format(scheme)

    return format_of


def _head_format(scheme: QuantizationScheme, path: str) -> MatrixFormat:
    if scheme.method == "rounding" and scheme.covers(path):
        bits = max(scheme.bits, HEAD_BITS)
        return _format(
            dataclasses.replace(scheme, bits=bits, group_size=DEFAULT_GROUP_SIZE, symmetric=True)
        )
    if scheme.quantized_head and path.endswith(_HEAD):
        return _format(scheme)
    return DenseMatrix


def _format(scheme: QuantizationScheme) -> MatrixFormat:
    return partial(_FORMATS[scheme.method], scheme=scheme)


def rounded_alike(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme by which random weights get the form that ``scheme`` gives to a checkpoint's."""
    if scheme.method.startswith("fp8"):
        return dataclasses.replace(scheme, method="fp8_rounding")
    return dataclasses.replace(scheme, method="rounding")


def check_experts(model: nn.Module, scheme: QuantizationScheme, kernels: LayerKernels) -> None:
    """
    Raises:
        ConfigError: ``model`` is a mixture of experts, and ``kernels`` cannot compute it with
        weights of this form.
    """
    if not any(isinstance(module, Experts) for module in model.modules()):
        return
    if not kernels.multiplies_quantized_experts and scheme.method != "mxfp4":
        raise ConfigError(
            "Quantized weights of a mixture of experts are supported on CPUs alone; choose --device cpu, or the plain "
            "checkpoint without --quantization. One with fp8 blocks is decoded by --quantization plain."
        )
    if scheme.method.startswith("fp8"):
        raise ConfigError(
            "8-bit floats of a mixture of experts are not supported; choose the plain checkpoint, perhaps with "
            "--quantization int8 or int4."
        )
    if scheme.activation_order:
        raise ConfigError(
            "A mixture of experts with GPTQ's desc_act, which orders the columns of each expert in its own way, is not "
            "supported; choose a checkpoint without desc_act."
        )
