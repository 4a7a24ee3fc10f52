"""The weight matrix of a linear layer: how it is stored, loaded and multiplied by."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.layers.weights import WeightSlot, parameter


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one projection of a checkpoint lies in the matrix of a layer, and what part of it a rank keeps."""

    name: str
    """Of the projection in the checkpoint, without ``.weight``: ``model.layers.0.self_attn.q_proj``."""
    size: tuple[int, int]
    """(output features, input features) of the whole projection."""
    rows: slice
    """The matrix's output features that are this projection's."""
    dim: int
    """What is split over ranks: 0 the output features, 1 the input features."""
    start: int
    """Where in ``dim`` of the whole projection this rank's part begins."""


class Weights(nn.Module):
    """``rows`` output features by ``columns`` input features, stored in some format."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns


class Matrix(Weights, ABC):
    """Weights that all tokens are multiplied by."""

    @abstractmethod
    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """[num_tokens, columns], bias [rows] -> [num_tokens, rows]"""


class EmbeddingMatrix(Matrix):
    """One that can be an embedding, too."""

    @abstractmethod
    def look_up(self, rows: Tensor) -> Tensor:
        """Some of the rows: [n] int64 -> [n, columns]"""


class DecodableMatrix(Matrix):
    """One whose rows can be had as plain weights."""

    @abstractmethod
    def plain(self, rows: slice) -> Tensor:
        """Some of the rows: [n, columns] of the model's dtype"""


class LoadableMatrix(Matrix):
    """One in a form in which checkpoints are loaded."""

    @abstractmethod
    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint's tensors that make up one projection, and where they go."""

    def finish(self) -> None:
        """All tensors are loaded.

        Raises:
            ConfigError: what they say together has no sense.
        """


MatrixFormat = Callable[[int, int], LoadableMatrix]
"""Makes an empty matrix of (rows, columns)."""


class DenseMatrix(EmbeddingMatrix, DecodableMatrix, LoadableMatrix):
    """One number an element, of torch's current default dtype and device."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.weight = parameter(rows, columns)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(hidden, self.weight, bias)

    def look_up(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight)

    def plain(self, rows: slice) -> Tensor:
        return self.weight[rows]

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        target = self.weight[placement.rows]
        slot = WeightSlot(placement.size, target, placement.dim, placement.start)
        yield f"{placement.name}.weight", slot


class MatrixLayer(nn.Module):
    """A layer whose weight is one matrix. It is made without it, since the checkpoint decides the format."""

    matrix: Weights

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

    @property
    def loadable(self) -> LoadableMatrix:
        """The matrix, which must not be packed yet."""
        assert isinstance(self.matrix, LoadableMatrix), "nothing is loaded into a packed matrix"
        return self.matrix


class MatrixStack(MatrixLayer):
    """Matrices of one shape and format, one below the other in one matrix: a mixture of experts has one for each."""

    def __init__(self, count: int, rows: int, columns: int) -> None:
        """
        Args:
            rows, columns: of each matrix.
        """
        super().__init__(count * rows, columns)
        self.count = count

    def rows_of(self, index: int) -> slice:
        """Where one of the matrices lies."""
        rows = self.rows // self.count
        return slice(index * rows, (index + 1) * rows)

    def plain(self, index: int) -> Tensor:
        """One of the matrices, of the model's dtype; not after it was packed."""
        assert isinstance(self.matrix, DecodableMatrix)
        return self.matrix.plain(self.rows_of(index))
