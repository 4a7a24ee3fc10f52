"""Matrices in quantized blocks, those of GGUF files and MXFP4 of safetensors: packed for the native
CPU kernels while they are loaded, or stacks of them, which the experts of a mixture have."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.matrix import (
    DecodableMatrix,
    DenseMatrix,
    EmbeddingMatrix,
    LoadableMatrix,
    Placement,
)
from radixrt.layers.quantization.scheme import BLOCK_KINDS, BlockKind, QuantizationScheme
from radixrt.layers.weights import WeightSlot
from radixrt_kernels import blockwise, linear
from radixrt_kernels.memory import Slabs

MXFP4 = 39
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
"""Bias of the exponents."""


class BlockStack(LoadableMatrix):
    """In the checkpoint: each projection's rows of blocks, uint8 [output features, bytes of a row].
    They are packed later, all matrices of the stack together."""

    blocks: Tensor

    def __init__(self, rows: int, columns: int, kind: int) -> None:
        super().__init__(rows, columns)
        self.kind = kind
        block = BLOCK_KINDS[kind]
        self.row_blocks = columns // block.columns
        self.register_buffer(
            "blocks", torch.empty(rows, self.row_blocks * block.num_bytes, dtype=torch.uint8)
        )

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError("a stack is multiplied by matrix, once it is packed")

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        block = BLOCK_KINDS[self.kind]
        outputs, inputs = placement.size
        yield (
            f"{placement.name}.weight",
            WeightSlot(
                (outputs, inputs // block.columns * block.num_bytes),
                self.blocks[placement.rows],
                placement.dim,
                _first(placement, self.columns, block, block.num_bytes),
                weights_an_element=Fraction(block.columns, block.num_bytes),
            ),
        )


def _first(placement: Placement, columns: int, kind: BlockKind, unit: int) -> int:
    """The start of a placement of ``columns``: a row, or a block of ``unit`` elements.

    Raises:
        ConfigError: a rank's part begins or ends within a block.
    """
    if placement.dim == 0:
        return placement.start
    if placement.start % kind.columns or columns % kind.columns:
        raise ConfigError(
            f"The {placement.size[1]} input features of {placement.name} cannot be split over --tp ranks between its "
            f"blocks of {kind.columns} ({kind.name}); choose a smaller --tp."
        )
    return placement.start // kind.columns * unit


class MixedStack(LoadableMatrix):
    """A stack whose matrices consist of equal parts, each of a kind of its own: an expert's gate
    and up."""

    def __init__(self, rows: int, columns: int, kinds: Sequence[int | None]) -> None:
        """
        Args:
            kinds: GGUF's numbers of the quantization; None: a part with plain weights.
        """
        super().__init__(rows, columns)
        each = rows // len(kinds)
        self.parts = [
            DenseMatrix(each, columns) if kind is None else BlockStack(each, columns, kind)
            for kind in kinds
        ]

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError("a stack is multiplied by matrix, once it is packed")

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        size = placement.rows.stop - placement.rows.start
        matrix, index = divmod(placement.rows.start // size, len(self.parts))
        rows = slice(matrix * size, (matrix + 1) * size)
        yield from self.parts[index].slots(dataclasses.replace(placement, rows=rows))


class Mxfp4Stack(BlockStack, DecodableMatrix):
    """In the checkpoint, with G blocks of 32 input features (gpt-oss; OCP Microscaling Formats,
    2023):

    ``blocks`` uint8 [output features, G, 16], two neighbouring 4-bit floats a byte, the first in
    the low half; ``scales`` uint8 [output features, G], exponents. GGUF's blocks have the exponent
    in front, and features 16 apart in a byte.
    """

    def __init__(self, rows: int, columns: int, scheme: QuantizationScheme) -> None:
        super().__init__(rows, columns, MXFP4)
        self.dtype = torch.get_default_dtype()

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        outputs, inputs = placement.size
        shape = (outputs, inputs // BLOCK_KINDS[MXFP4].columns)
        first = _first(placement, self.columns, BLOCK_KINDS[MXFP4], 1)
        blocks = self.blocks.unflatten(1, (self.row_blocks, -1))[placement.rows]
        yield (
            f"{placement.name}.blocks",
            WeightSlot(
                (*shape, 16),
                blocks[:, :, 1:],
                placement.dim,
                first,
                convert=_as_in_gguf,
                weights_an_element=2,
            ),
        )
        scales = WeightSlot(shape, blocks[:, :, 0], placement.dim, first, weights_an_element=0)
        yield f"{placement.name}.scales", scales

    def plain(self, rows: slice) -> Tensor:
        blocks = self.blocks[rows].unflatten(1, (self.row_blocks, -1))
        codes = torch.cat([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], dim=-1)
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
        exponents = blocks[:, :, :1].int() - _BIAS
        return torch.ldexp(values[codes.int()], exponents).flatten(1).to(self.dtype)

    def dequantized(self) -> DenseMatrix:
        """The stack as plain weights, for devices without a product of blocks."""
        dense = DenseMatrix(0, self.columns)
        dense.rows = self.rows
        dense.weight.data = self.plain(slice(None))
        return dense


def _as_in_gguf(blocks: Tensor) -> Tensor:
    """Bytes with neighbouring features -> bytes with feature ``i`` in the low half and ``i + 16``
    in the high half."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    first, second = codes.chunk(2, dim=-1)
    return first | second << 4


def block_matrices() -> Callable[..., "BlockMatrix"]:
    """Makes matrices of one model, whose memory is together: of rows, columns and kinds."""
    return partial(BlockMatrix, memory=Slabs())


class PlainPart(NamedTuple):
    """The weights of a projection beside those in blocks; see ``radixrt_kernels.linear``."""

    weight: Tensor
    rows: int


class BlockMatrix(EmbeddingMatrix, LoadableMatrix):
    """In the checkpoint: each projection's rows of blocks, uint8 [output features, bytes of a row],
    or plain weights.

    Projections that are computed together may be of different kinds. See
    ``radixrt_kernels.blockwise``.
    """

    def __init__(
        self, rows: int, columns: int, kinds: Mapping[str, int | None], memory: Slabs
    ) -> None:
        """
        Args:
            kinds: GGUF's number of the quantization by the projection's name in the checkpoint;
                None: its weights are plain.
            memory: of all matrices of the model.
        """
        super().__init__(rows, columns)
        self.kinds = kinds
        self._memory = memory
        self.dtype = torch.get_default_dtype()
        self.parts: list[blockwise.PackedBlocks | PlainPart] = []
        """The parts of all projections, in the order of their rows."""
        self.blocks: list[blockwise.PackedBlocks] = []
        """The parts that are in blocks."""
        self._loaded: dict[int, blockwise.PackedBlocks | PlainPart] = {}

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if len(self.blocks) == len(self.parts):
            return blockwise.linear(hidden, self.blocks, bias)
        output, first = hidden.new_empty(len(hidden), self.rows), 0
        for part in self.parts:
            rows = slice(first, first + part.rows)
            first = rows.stop
            own, into = None if bias is None else bias[rows], output[:, rows]
            if isinstance(part, PlainPart):
                linear.linear(hidden, part.weight, part.rows, own, output=into)
            else:
                blockwise.linear(hidden, [part], own, output=into)
        return output

    def scores(self, hidden: Tensor) -> Tensor:
        return blockwise.linear(hidden, self.blocks, output_dtype=torch.float32)

    def look_up(self, rows: Tensor) -> Tensor:
        (whole,) = self.blocks
        return blockwise.look_up(whole, rows, self.dtype)

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        number = self.kinds[placement.name]
        outputs, inputs = placement.size
        rows = range(self.rows)[placement.rows]
        start, count = placement.start, len(rows)
        if number is None:
            assert placement.dim == 0, "projections that are computed together have the same inputs"
            store, nowhere = partial(self._pack_plain, rows.start), torch.empty(0, dtype=self.dtype)
            slot = WeightSlot(placement.size, nowhere, 0, start, count=count, store=store)
            yield f"{placement.name}.weight", slot
            return
        kind = BLOCK_KINDS[number]
        start = _first(placement, self.columns, kind, kind.num_bytes)
        if placement.dim == 1:
            count = self.columns // kind.columns * kind.num_bytes
        slot = WeightSlot(
            (outputs, inputs // kind.columns * kind.num_bytes),
            torch.empty(0, dtype=torch.uint8),
            placement.dim,
            start,
            weights_an_element=Fraction(kind.columns, kind.num_bytes),
            count=count,
            store=partial(self._pack, rows.start, number),
        )
        yield f"{placement.name}.weight", slot

    def _pack(self, first: int, kind: int, blocks: Tensor) -> None:
        rows = self.rows if len(self.kinds) == 1 else len(blocks)  # an embedding may have padding
        self._loaded[first] = blockwise.pack(blocks, kind, rows, self.columns, self._memory)

    def _pack_plain(self, first: int, weight: Tensor) -> None:
        self._loaded[first] = PlainPart(linear.pack(weight.to(self.dtype)), len(weight))

    def finish(self) -> None:
        self.parts = [part for _, part in sorted(self._loaded.items())]
        self.blocks = [part for part in self.parts if isinstance(part, blockwise.PackedBlocks)]
        self._loaded.clear()
        for index, part in enumerate(self.parts):
            if isinstance(part, PlainPart):
                self.register_buffer(f"plain{index}", part.weight)
            else:
                self.register_buffer(f"packed{index}", part.packed)
