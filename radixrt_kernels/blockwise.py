"""Linear layers with the quantized blocks of GGUF files; activations are rounded to 8 bits, with
one scale per 32 columns.

The packed form keeps the codes and scales of the file with their own numbers of bits, in panels of
16 output features like :mod:`radixrt_kernels.linear`; of IQ2 and IQ3 kinds it has the magnitudes
and signs in place of their indices of a grid. ``csrc/block_forms.hpp`` describes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixrt_kernels import native, trace
from radixrt_kernels.linear import PANEL
from radixrt_kernels.memory import Slabs, advise_huge_pages

if native is not None:
    _linear, _look_up = native.blockwise_linear, native.blockwise_look_up


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A packed matrix [rows, columns]."""

    packed: torch.Tensor  # uint8 [panels, bytes]
    kind: int  # GGUF's number of the quantization
    rows: int
    columns: int


def pack(
    blocks: torch.Tensor, kind: int, rows: int, columns: int, memory: Slabs | None = None
) -> PackedBlocks:
    """Pack the rows of a GGUF tensor for the kernels.

    Args:
        blocks: uint8 [at most rows, bytes of a row], as in the file; missing rows become zeros
        kind: GGUF's number: of Q4_0 to Q8_0, Q2_K to Q6_K, an IQ2, IQ3 or IQ4 kind, or MXFP4
        memory: for the packed form, shared with other matrices; None: its own

    Raises:
        ValueError: there is no packed form of ``kind``, or the shape does not fit.
    """
    assert native is not None
    panels, panel_bytes = -(-rows // PANEL), native.blockwise_panel_bytes(kind, columns)
    taken = (
        memory.take(panels * panel_bytes)
        if memory
        else torch.empty(panels * panel_bytes, dtype=torch.uint8)
    )
    packed = taken.view(panels, panel_bytes)
    packed[blocks.shape[0] // PANEL :].zero_()
    native.blockwise_pack(blocks, kind, columns, packed)
    return PackedBlocks(packed, kind, rows, columns)


def linear(
    hidden: torch.Tensor,
    matrices: Sequence[PackedBlocks],
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens by matrices, which may be of different kinds. Their outputs are side by side.

    Args:
        hidden: [num_tokens, columns], float32, bfloat16 or float16
        matrices: with the same columns
        bias: [rows of all matrices] of the same dtype, or None
        output_dtype: None: that of ``hidden``; or float32, in which sums are not rounded, without
            bias
        output: the result is written there, which may be columns of a wider tensor; None: it is
            allocated

    Returns:
        [num_tokens, rows of all matrices] of the same dtype, or of ``output_dtype``

    Raises:
        ValueError: the shapes do not fit.

    Example, a row of Q8_0: a scale of 0.5 and 32 codes:
        >>> import torch
        >>> scale = torch.tensor([0.5]).half().view(torch.uint8)
        >>> matrix = pack(torch.cat((scale, torch.arange(32, dtype=torch.uint8)))[None], 8, rows=1, columns=32)
        >>> linear(torch.ones(1, 32), [matrix])
        tensor([[248.]])
    """
    if output is None:
        shape = hidden.shape[0], sum(m.rows for m in matrices)
        output = hidden.new_empty(shape, dtype=output_dtype)
    trace.call(_linear, hidden, tuple((m.packed, m.kind, m.rows) for m in matrices), bias, output)
    return output


def pack_stack(blocks: torch.Tensor, kind: int, columns: int) -> PackedBlocks:
    """Pack matrices of one shape; the packed form has one more dimension, in front.

    Args:
        blocks: uint8 [matrices, rows, bytes of a row], as in the file
        kind: GGUF's number, as of :func:`pack`
    """
    assert native is not None
    count, rows, _ = blocks.shape
    panels, panel_bytes = -(-rows // PANEL), native.blockwise_panel_bytes(kind, columns)
    packed = torch.zeros((count, panels, panel_bytes), dtype=torch.uint8)
    advise_huge_pages(packed)
    for one, into in zip(blocks, packed, strict=True):
        native.blockwise_pack(one, kind, columns, into)
    return PackedBlocks(packed, kind, rows, columns)


def grouped_linear(
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    starts: torch.Tensor,
    stack: PackedBlocks,
    bias: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each input row by one matrix of a stack.

    Args:
        hidden: [num_tokens, columns], float32, bfloat16 or float16
        tokens: int32 [n], the token of each input row; None: the rows of ``hidden``
        starts: int32 [matrices + 1]; rows ``starts[i]`` to ``starts[i + 1]`` are multiplied by
            matrix ``i``
        stack: packed by :func:`pack_stack`
        bias: [matrices, rows] of the same dtype, or None
        output: as of :func:`linear`

    Returns:
        [n, rows] of the same dtype; ``rows`` is that of one matrix
    """
    assert native is not None
    s = stack
    if output is None:
        output = hidden.new_empty((len(hidden) if tokens is None else len(tokens), s.rows))
    multiply = native.grouped_blockwise_linear
    trace.call(multiply, hidden, tokens, starts, s.packed, s.kind, s.rows, output, bias)
    return output


def look_up(matrix: PackedBlocks, wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode the rows ``wanted`` ([n] int64) of a matrix. Returns [n, columns] of ``dtype``."""
    output = torch.empty((wanted.shape[0], matrix.columns), dtype=dtype)
    trace.call(_look_up, matrix.packed, matrix.kind, matrix.rows, wanted, output)
    return output
