"""Decodes weights of 8-bit floats that have a scale for each block of rows and columns (DeepSeek
V3, 2024), tensor by tensor while a checkpoint is read."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError

FP8 = torch.float8_e4m3fn
_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"
_LISTED = 3
"""Names that an error lists."""


def decoded(
    tensors: Iterable[tuple[str, Tensor]], block: tuple[int, int]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, those of 8-bit floats decoded to float32.

    A weight is held until its scales come, which may be in another file; it is mapped, so it takes
    no memory until then. Tensors without scales pass as they are.

    Args:
        block: (rows, columns) that share a scale; the last block of each may be smaller.

    Raises:
        ConfigError: a weight lacks its scales, or the scales do not fit it.
    """
    codes: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith(_SCALE):
            path = name.removesuffix(_SCALE)
            scales[path] = tensor
        elif tensor.dtype == FP8 and name.endswith(_WEIGHT):
            path = name.removesuffix(_WEIGHT)
            codes[path] = tensor
        else:
            yield name, tensor
            continue
        if path in codes and path in scales:
            yield path + _WEIGHT, _decode(path, codes.pop(path), scales.pop(path), block)
    if codes:
        raise ConfigError(
            f"The checkpoint has no scales for {_listed(codes, _WEIGHT)}, which are 8-bit floats: it must hold "
            f"{next(iter(codes))}{_SCALE}. Download its files again, or choose the bfloat16 original."
        )
    if scales:
        raise ConfigError(
            f"The checkpoint has {_listed(scales, _SCALE)}, but no weights of 8-bit floats that they belong to. Download "
            "its files again, or choose the bfloat16 original."
        )


def _decode(path: str, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns], one scale a block -> float32 alike"""
    expected = [-(-size // each) for size, each in zip(codes.shape, block, strict=False)]
    if codes.ndim != 2 or list(scales.shape) != expected:
        raise ConfigError(
            f"The checkpoint's {path}{_SCALE} is {list(scales.shape)}, expected {expected} for a weight of "
            f"{list(codes.shape)} in blocks of {block[0]} x {block[1]}: quantization_config has the wrong "
            "'weight_block_size', or the files are of two checkpoints."
        )
    rows, columns = codes.shape
    weight = torch.empty(rows, columns)
    by_column = scales.float().repeat_interleave(block[1], dim=1)[:, :columns]
    for index, of_block in enumerate(by_column):  # without a scale for each weight in memory
        part = slice(index * block[0], min(rows, (index + 1) * block[0]))
        torch.mul(*_numbers(codes[part], of_block), out=weight[part])
    return weight


_BIAS_DIFFERENCE = 256.0
"""2 to the power of the difference of float16's and E4M3's exponent biases."""
_NAN = 0x3F80


def _numbers(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the weights: the bits of E4M3 are those of a float16 of another bias. That is twice
    as fast as torch's conversion, which NaN needs."""
    bits = codes.view(torch.int8).short().bitwise_left_shift_(7)  # the sign twice
    if int((bits & 0x3FFF).amax()) == _NAN:
        return codes.float(), scales
    return bits.bitwise_and_(~0x4000).view(torch.float16), scales * _BIAS_DIFFERENCE


def _listed(paths: Iterable[str], ending: str) -> str:
    names = sorted(path + ending for path in paths)
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
