"""The weight matrix of a linear layer: its storage, loading and products."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.layers.lora import LoraStack
from radixrt.layers.weights import WeightSlot, parameter


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one projection of a checkpoint in the matrix of a layer, and the part of it that
    a rank keeps."""

    name: str
    """Name of the projection in the checkpoint, without ``.weight``:
    ``model.layers.0.self_attn.q_proj``."""
    size: tuple[int, int]
    """(output features, input features) of the whole projection."""
    rows: slice
    """The projection's output features in the matrix."""
    dim: int
    """The dimension that is split over ranks: 0 the output features, 1 the input features."""
    start: int
    """First index of this rank's part in ``dim`` of the whole projection."""


class Weights(nn.Module):
    """``rows`` output features by ``columns`` input features, stored in some format."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns


class Matrix(Weights, ABC):
    """Weights by which all tokens are multiplied."""

    @abstractmethod
    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """[num_tokens, columns], bias [rows] -> [num_tokens, rows]"""


class EmbeddingMatrix(Matrix):
    """A matrix that can also be an embedding."""

    def scores(self, hidden: Tensor) -> Tensor:
        """As ``multiply`` without bias: in float32 where the kernels can give their sums, else in
        the model's dtype."""
        return self.multiply(hidden, None)

    @abstractmethod
    def look_up(self, rows: Tensor) -> Tensor:
        """Rows by index: [n] int64 -> [n, columns]"""


class DecodableMatrix(Matrix):
    """A matrix whose rows can be decoded to plain weights."""

    @abstractmethod
    def plain(self, rows: slice) -> Tensor:
        """A range of rows: [n, columns] in the model's dtype"""


class LoadableMatrix(Matrix):
    """A matrix in the form into which checkpoints are loaded."""

    @abstractmethod
    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        """Names of the checkpoint's tensors that make up one projection, and their slots."""

    def finish(self) -> None:
        """Called when all tensors are loaded.

        Raises:
            ConfigError: they contradict one another.
        """


MatrixFormat = Callable[[int, int], LoadableMatrix]
"""Makes an empty matrix of (rows, columns)."""


class DenseMatrix(EmbeddingMatrix, DecodableMatrix, LoadableMatrix):
    """Plain weights, of torch's current default dtype and device."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.weight = parameter(rows, columns)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(hidden, self.weight, bias)

    def look_up(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight)

    def plain(self, rows: slice) -> Tensor:
        return self.weight[rows]

    def replace(self, places: Tensor, rows: "DenseMatrix") -> None:
        """Put rows in place of those of ``places``, int64 [rows.rows]."""
        self.weight[places] = rows.weight.to(self.weight.dtype)

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        target = self.weight[placement.rows]
        slot = WeightSlot(placement.size, target, placement.dim, placement.start)
        yield f"{placement.name}.weight", slot


class MatrixLayer(nn.Module):
    """A layer whose weight is one matrix. The matrix is made later, since the checkpoint decides
    its format."""

    matrix: Weights
    packs = True
    """False: the matrix is used in the form in which it was loaded."""

    def __init__(self, rows: int, columns: int) -> None:
        """
        Args:
            rows, columns: output and input features of this rank's part.
        """
        super().__init__()
        self.rows = rows
        self.columns = columns

    def allocate(self, matrix_format: MatrixFormat) -> None:
        """Make the matrix, on torch's current default device."""
        self.matrix = matrix_format(self.rows, self.columns)

    def pack(self, kernels: Any) -> None:
        """Bring the loaded matrix into the form that ``kernels``, a ``LayerKernels``, multiply by
        fastest."""
        self.matrix = kernels.pack(self.loadable)

    @property
    def loadable(self) -> LoadableMatrix:
        """The matrix, which must not be packed yet."""
        assert isinstance(self.matrix, LoadableMatrix), "nothing is loaded into a packed matrix"
        return self.matrix


class HeadMatrices(Weights):
    """A matrix for each attention head, by which the head's own inputs are multiplied."""

    def __init__(self, weight: Tensor) -> None:
        """
        Args:
            weight: [heads, rows, columns]
        """
        super().__init__(weight.shape[1], weight.shape[2])
        self.weight = nn.Parameter(weight, requires_grad=False)

    def multiply(self, hidden: Tensor, output: Tensor) -> None:
        """[num_tokens, heads, columns] -> [num_tokens, heads, rows], written to ``output``; both
        may be views."""
        output.copy_((hidden.transpose(0, 1) @ self.weight.transpose(1, 2)).transpose(0, 1))


class MatrixStack(MatrixLayer):
    """Matrices of one shape and format, one below the other in one matrix: one for each expert of a
    mixture."""

    lora: LoraStack | None = None
    """The adapters of the matrices; None: none has been loaded that changes one."""

    def __init__(self, count: int, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__(count * rows, columns)
        self.count, self.rows_each = count, rows
        self.bias = nn.Parameter(torch.zeros(count, rows), requires_grad=False) if bias else None

    def pack(self, kernels: Any) -> None:
        self.matrix = kernels.pack_stack(self.loadable, self.count)

    def rows_of(self, index: int) -> slice:
        """The rows of one of the matrices."""
        return slice(index * self.rows_each, (index + 1) * self.rows_each)

    def plain(self, index: int) -> Tensor:
        """One of the matrices in the model's dtype; only before it is packed."""
        assert isinstance(self.matrix, DecodableMatrix)
        return self.matrix.plain(self.rows_of(index))

    def multiply(self, index: int, hidden: Tensor) -> Tensor:
        """[num_tokens, columns] -> [num_tokens, rows] of one of the matrices; only before it is
        packed."""
        return F.linear(hidden, self.plain(index), None if self.bias is None else self.bias[index])
