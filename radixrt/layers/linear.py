"""Linear layers split over ranks, and how the projections a checkpoint keeps apart are merged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from radixrt.errors import ConfigError
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot, parameter


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a checkpoint and the rows of its weight that this rank computes."""

    name: str
    """In the checkpoint: ``q_proj``, ``gate_proj``, ..."""
    size: int
    """Output features of the whole projection."""
    start: int
    rows: int

    @staticmethod
    def even(name: str, size: int, tp: TensorParallel) -> "Projection":
        """Each rank computes an equal part."""
        rows = tp.share(size, f"{name} size")
        return Projection(name, size, tp.rank * rows, rows)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one rank. Fewer KV heads than ranks: each is computed by several ranks."""

    query: int
    kv: int
    first_kv: int
    head_dim: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, head_dim: int, tp: TensorParallel) -> "Heads":
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


class ColumnParallelLinear(nn.Module):
    """One or several projections of the same input in one matrix, output features split over ranks.

    In the model its place is that of the projections: merged as ``self_attn.qkv_proj``, it loads
    ``self_attn.q_proj.weight``, ``self_attn.k_proj.weight`` and ``self_attn.v_proj.weight``.
    """

    def __init__(self, input_size: int, projections: Sequence[Projection], bias: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.projections = projections
        self.sizes = [p.rows for p in projections]
        self.weight = parameter(sum(self.sizes), input_size)
        self.bias = (
            nn.Parameter(torch.zeros(sum(self.sizes)), requires_grad=False) if bias else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, input_size] -> [num_tokens, this rank's rows of all projections]"""
        return F.linear(hidden, self.weight, self.bias)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        parent = path.rpartition(".")[0]
        first = 0
        for p in self.projections:
            rows = slice(first, first + p.rows)
            first += p.rows
            weight_shape = (p.size, self.input_size)
            yield (
                f"{parent}.{p.name}.weight",
                WeightSlot(weight_shape, self.weight[rows], 0, p.start),
            )
            if self.bias is not None:
                yield (
                    f"{parent}.{p.name}.bias",
                    WeightSlot((p.size,), self.bias[rows], 0, p.start),
                )


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are split over ranks; the outputs are summed."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.input_size = input_size
        self.weight = parameter(output_size, tp.share(input_size, "projection input size"))
        self.bias = nn.Parameter(torch.zeros(output_size), requires_grad=False) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, input_size / tp.size] -> [num_tokens, output_size], the same on every rank"""
        if self.tp.size == 1:
            return F.linear(hidden, self.weight, self.bias)
        output = self.tp.all_reduce(F.linear(hidden, self.weight))
        return output if self.bias is None else output + self.bias

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        output_size, columns = self.weight.shape
        start = self.tp.rank * columns
        yield f"{path}.weight", WeightSlot((output_size, self.input_size), self.weight, 1, start)
        if self.bias is not None:
            yield f"{path}.bias", WeightSlot((output_size,), self.bias)
