"""Linear layers split over ranks, where projections of the same input are merged into one matrix;
and token embedding and LM head, split over ranks by vocabulary."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.lora import LoraStack
from radixrt.layers.matrix import (
    EmbeddingMatrix,
    Matrix,
    MatrixFormat,
    MatrixLayer,
    Placement,
)
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a checkpoint and the rows of its weight that this rank computes."""

    name: str
    """Name in the checkpoint: ``q_proj``, ``gate_proj``, ..."""
    size: int
    """Output features of the whole projection."""
    start: int
    rows: int

    @staticmethod
    def even(name: str, size: int, tp: TensorParallel) -> "Projection":
        """Each rank computes an equal part."""
        rows = tp.share(size, f"{name} size")
        return Projection(name, size, tp.rank * rows, rows)

    @staticmethod
    def whole(name: str, size: int) -> "Projection":
        """Each rank computes all of it: a small one, whose sum over ranks would take longer."""
        return Projection(name, size, 0, size)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one rank. Where there are fewer KV heads than ranks, several ranks
    compute each."""

    query: int
    kv: int
    first_kv: int
    head_dim: int

    @staticmethod
    def for_rank(num_heads: int, num_kv_heads: int, head_dim: int, tp: TensorParallel) -> "Heads":
        query = tp.share(num_heads, "number of attention heads")
        if num_kv_heads >= tp.size:
            kv = tp.share(num_kv_heads, "number of KV heads")
            return Heads(query, kv, tp.rank * kv, head_dim)
        if tp.size % num_kv_heads:
            raise ConfigError(
                f"The model's {num_kv_heads} KV heads cannot be replicated evenly over --tp {tp.size} ranks."
            )
        return Heads(query, 1, tp.rank * num_kv_heads // tp.size, head_dim)

    def projections(
        self, num_heads: int, num_kv_heads: int, tp: TensorParallel
    ) -> list[Projection]:
        """The rows of ``q_proj``, ``k_proj`` and ``v_proj`` that compute these heads."""
        kv_size, kv_start, kv_rows = (
            heads * self.head_dim for heads in (num_kv_heads, self.first_kv, self.kv)
        )
        return [
            Projection.even("q_proj", num_heads * self.head_dim, tp),
            Projection("k_proj", kv_size, kv_start, kv_rows),
            Projection("v_proj", kv_size, kv_start, kv_rows),
        ]


class LinearLayer(MatrixLayer, ABC):
    """A matrix and perhaps a bias."""

    matrix: Matrix
    lora: LoraStack | None = None
    """The adapters of the layer; None: none has been loaded that changes it."""

    def __init__(self, rows: int, columns: int, bias: bool) -> None:
        super().__init__(rows, columns)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if bias else None

    @abstractmethod
    def placements(self, path: str) -> Iterator[Placement]:
        """The checkpoint's projections, given the layer's own path in the model."""

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for placement in self.placements(path):
            yield from self.loadable.slots(placement)
            if self.bias is not None:
                whole = (placement.size[0],)
                start = placement.start if placement.dim == 0 else 0
                bias = WeightSlot(whole, self.bias[placement.rows], 0, start)
                yield f"{placement.name}.bias", bias


class ColumnParallelLinear(LinearLayer):
    """One or several projections of the same input in one matrix, output features split over ranks.

    Its path in the model is beside those of the projections: ``self_attn.qkv_proj`` loads
    ``self_attn.q_proj.weight``, ``self_attn.k_proj.weight`` and ``self_attn.v_proj.weight``.
    """

    def __init__(self, input_size: int, projections: Sequence[Projection], bias: bool) -> None:
        self.sizes = [p.rows for p in projections]
        super().__init__(sum(self.sizes), input_size, bias)
        self.projections = projections

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, input_size] -> [num_tokens, this rank's rows of all projections]"""
        output = self.matrix.multiply(hidden, self.bias)
        return output if self.lora is None else self.lora.add(hidden, output)

    def placements(self, path: str) -> Iterator[Placement]:
        parent = path.rpartition(".")[0]
        first = 0
        for p in self.projections:
            rows = slice(first, first + p.rows)
            first += p.rows
            yield Placement(f"{parent}.{p.name}", (p.size, self.columns), rows, 0, p.start)


class RowParallelLinear(LinearLayer):
    """A linear layer whose input features are split over ranks; the outputs are summed."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(output_size, tp.share(input_size, "projection input size"), bias)
        self.tp = tp
        self.input_size = input_size

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, input_size / tp.size] -> [num_tokens, output_size], the same on every
        rank"""
        output = self.matrix.multiply(hidden, self.bias if self.tp.size == 1 else None)
        if self.lora is not None:
            output = self.lora.add(hidden, output)
        if self.tp.size == 1:
            return output
        output = self.tp.all_reduce(output)
        return output if self.bias is None else output + self.bias

    def placements(self, path: str) -> Iterator[Placement]:
        start = self.tp.rank * self.columns
        yield Placement(path, (self.rows, self.input_size), slice(None), 1, start)


def allocate_matrices(
    model: nn.Module, format_of: Callable[[str, Sequence[str]], MatrixFormat]
) -> None:
    """Give every layer of ``model`` that has a matrix an empty one.

    Args:
        format_of: by the layer's path in the model and the checkpoint's names of the projections
            merged in it; checkpoints keep some layers in other formats.
    """
    for path, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            placements = module.placements(path) if isinstance(module, LinearLayer) else ()
            module.allocate(format_of(path, [placement.name for placement in placements]))


def pack_matrices(model: nn.Module, kernels: LayerKernels) -> None:
    """Bring every loaded matrix of ``model`` into the form that ``kernels`` multiply by fastest.

    Raises:
        ConfigError: the tensors of a matrix contradict one another.
    """
    for module in model.modules():
        if isinstance(module, MatrixLayer):
            module.loadable.finish()
            if module.packs:
                module.pack(kernels)


class VocabParallelEmbedding(MatrixLayer):
    """Rank ``r`` holds rows ``r * rows`` to ``(r + 1) * rows``; those of the last rank may be
    padding.

    A model with tied embeddings has one instance for both, so its matrix must multiply and look
    rows up.
    """

    matrix: EmbeddingMatrix

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(-(-vocab_size // tp.size), hidden_size)
        self.tp = tp
        self.vocab_size = vocab_size
        self.first = tp.rank * self.rows

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        if self.tp.size == 1:
            return self.matrix.look_up(input_ids)
        ours = (input_ids >= self.first) & (input_ids < self.first + self.rows)
        embedded = self.matrix.look_up(torch.where(ours, input_ids - self.first, 0))
        return self.tp.all_reduce(torch.where(ours[:, None], embedded, 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the whole vocabulary, on every rank: [rows, hidden_size] -> [rows, vocab_size]
        float32, without gaps"""
        padded = self.tp.all_gather(self.matrix.scores(hidden))
        return padded[:, : self.vocab_size].float().contiguous()

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        real_rows = max(0, min(self.rows, self.vocab_size - self.first))
        start = min(self.first, self.vocab_size)
        size = (self.vocab_size, self.columns)
        yield from self.loadable.slots(Placement(path, size, slice(0, real_rows), 0, start))


class LookUpTable(VocabParallelEmbedding):
    """An embedding by which nothing is multiplied; it may be larger than all other weights (Gemma
    4's inputs of each layer)."""

    packs = False
