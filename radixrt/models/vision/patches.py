"""Towers for images of any size: patches with positions in height and width, and attention over
all of an image or in windows of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.layers.linear import ColumnParallelLinear, Projection
from radixrt.models.vision.tower import (
    Pieces,
    Segments,
    activation,
    attend,
    in_rows,
    linear,
    products,
)


class Turns:
    """Rotations of heads by row and column of a patch (RoPE in two axes): half of the pairs turn by
    each.

    Args:
        between: the frequencies of the columns lie between those of the rows (Pixtral); else they
            are the same.
    """

    def __init__(self, head_dim: int, base: float, *, between: bool = False) -> None:
        exponents = torch.arange(0, head_dim, 4).float()
        self._of_rows = base ** -(exponents / head_dim)
        self._of_columns = base ** -((exponents + 2 * between) / head_dim)

    def angles(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[patches] of both -> radians [patches, head_dim / 2]"""
        by_rows = torch.outer(rows.float(), self._of_rows)
        return torch.cat((by_rows, torch.outer(columns.float(), self._of_columns)), 1)


def turn(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotate the halves of heads: [patches, heads, head_dim], angles [patches, head_dim / 2]"""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


class PatchAttention(nn.Module):
    """Attention of patches to those of their segment.

    Args:
        names: of the checkpoint's tensors that make up the projection of query, key and value.
    """

    def __init__(self, size: int, heads: int, names: Sequence[str], *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        parts = [Projection.whole(name, 3 * size // len(names)) for name in names]
        self.qkv = ColumnParallelLinear(size, parts, bias)
        self.proj = linear(size, size, bias)

    def pieces(self, norm: Any, hidden: Tensor, angles: Tensor, segments: Segments) -> Pieces:
        """The residual stream [patches, size] with the attention to its norm added."""

        def project(rows: Tensor, radians: Tensor) -> Tensor:
            heads = self.qkv.forward(norm.forward(rows)).unflatten(1, (3, self.heads, -1))
            query, key, value = heads.unbind(1)
            return torch.stack((turn(query, radians), turn(key, radians), value), 1)

        projected = yield from in_rows(project, products(self.qkv), hidden, angles)
        attended = yield from attend(projected, segments)

        def join(rows: Tensor, residual: Tensor) -> Tensor:
            return residual + self.proj.forward(rows)

        return (yield from in_rows(join, products(self.proj), attended, hidden))


class GatedPatchMLP(nn.Module):
    """A gate, by whose activation the other half is multiplied."""

    def __init__(self, config: Any, *, bias: bool) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = linear(size, inner, bias), linear(size, inner, bias)
        self.down_proj = linear(inner, size, bias)
        self.activate = activation(config.hidden_act)

    def forward(self, rows: Tensor) -> Tensor:
        """[patches, size] -> [patches, size]"""
        gate = self.activate(self.gate_proj.forward(rows))
        return self.down_proj.forward(gate * self.up_proj.forward(rows))


class PatchLayer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, norms: Sequence[nn.Module], attention: PatchAttention, mlp: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = attention
        self.mlp = mlp

    def pieces(self, hidden: Tensor, angles: Tensor, segments: Segments) -> Pieces:
        """[patches, size] of an image -> the same"""
        hidden = yield from self.attn.pieces(self.norm1, hidden, angles, segments)
        norm: Any = self.norm2
        cost = products(self.mlp)
        return (yield from in_rows(lambda rows: rows + self.mlp(norm.forward(rows)), cost, hidden))
