"""Matrices in the quantized blocks of GGUF files, packed for the native CPU kernels while they are
loaded."""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.matrix import EmbeddingMatrix, LoadableMatrix, Placement
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt.layers.weights import WeightSlot
from radixrt_kernels import blockwise, linear
from radixrt_kernels.memory import Slabs


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
        if placement.dim == 1:
            if start % kind.columns or self.columns % kind.columns:
                raise ConfigError(
                    f"The {inputs} input features of {placement.name} cannot be split over --tp ranks between its blocks "
                    f"of {kind.columns} ({kind.name}); choose a smaller --tp."
                )
            start, count = (n // kind.columns * kind.num_bytes for n in (start, self.columns))
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
