"""A vision transformer (Dosovitskiy et al., 2020), in pieces that are short enough to run between
the steps of answers.

The pieces of an image depend on the image alone: the same rows are computed together whatever else
the engine does, so the features have the same bits each time.
"""

import hashlib
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.linear import (
    ColumnParallelLinear,
    LinearLayer,
    Projection,
    RowParallelLinear,
)
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot, parameter
from radixrt.models.encoders import ACTIVATIONS, LayerNorm

ROWS = 256
"""Patches that are computed in one piece at most."""
PIECE = 1 << 29
"""Products of two numbers in one piece, about."""

ALONE = TensorParallel()
"""Each rank has the whole tower."""

Pieces = Generator[None, None, Tensor]
"""A computation that may rest at each ``yield``; it returns its result."""

Segments = Sequence[tuple[int, int]]
"""Rows from and to of the patches that see one another."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a tower's config names.

    Raises:
        ConfigError: it is not supported.
    """
    if name == "quick_gelu":
        return lambda x: x * torch.sigmoid(1.702 * x)
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"The activation {name!r} of the checkpoint's vision tower is not supported; supported: quick_gelu, "
            f"{', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


def linear(inputs: int, outputs: int, bias: bool = True) -> RowParallelLinear:
    """A linear layer that each rank has whole."""
    return RowParallelLinear(inputs, outputs, bias, ALONE)


def products(*modules: nn.Module) -> int:
    """The products of two numbers that a row takes in the linear layers of modules."""
    parts = (part for module in modules for part in module.modules())
    return sum(part.rows * part.columns for part in parts if isinstance(part, LinearLayer))


def rows_of_piece(cost: int) -> int:
    """How many rows are computed in one piece: a multiple of 16.

    Args:
        cost: the products of two numbers that a row takes.
    """
    return min(max(PIECE // (16 * cost), 1) * 16, ROWS)


def in_rows(compute: Callable[..., Tensor], cost: int, *inputs: Tensor) -> Pieces:
    """Compute row by row, some in a piece: the function takes those rows of each input.

    The rows are put into their place one piece at a time: joining those of a large image at the end
    takes as long as some steps of an answer.

    Args:
        cost: see :func:`rows_of_piece`.
    """
    rows, count = rows_of_piece(cost), len(inputs[0])
    first = compute(*(one[:rows] for one in inputs))
    output = first.new_empty(count, *first.shape[1:])
    output[:rows] = first
    yield
    for start in range(rows, count, rows):
        end = start + rows
        output[start:end] = compute(*(one[start:end] for one in inputs))
        yield
    return output


def attend(projected: Tensor, segments: Segments, scale: float | None = None) -> Pieces:
    """Attention of patches to those of their segment: query, key and value [patches, 3, heads,
    head_dim] -> [patches, heads * head_dim]

    Args:
        scale: of the scores; None: that of the head dimension to the power of -0.5.
    """
    width = projected[0, 0].numel()
    attended = projected.new_empty(len(projected), width)
    for start, end in segments:
        keys, values = projected[start:end, 1:].permute(1, 2, 0, 3)[:, None].unbind(0)
        rows = rows_of_piece(2 * width * (end - start))
        for first in range(start, end, rows):
            here = slice(first, min(first + rows, end))
            query = projected[here, 0].transpose(0, 1)[None]
            found = F.scaled_dot_product_attention(query, keys, values, scale=scale)
            attended[here] = found[0].transpose(0, 1).flatten(1)
            yield
    return attended


class FlatConvolution(nn.Module):
    """A convolution whose steps are its size, as the product that it is.

    Args:
        shape: of its kernel, channels first.
    """

    def __init__(self, shape: tuple[int, ...], outputs: int, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.proj = linear(torch.Size(shape).numel(), outputs, bias)
        self.dtype = torch.get_default_dtype()

    def forward(self, rows: Tensor) -> Tensor:
        """[patches, values of a patch] float32 -> [patches, outputs]. Few rows are converted at a
        time: a large image has 300 MB of them."""
        return self.proj.forward(rows.to(self.dtype))

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in self.proj.weight_slots(path):
            if name.endswith(".weight"):
                kernel = (self.proj.rows, *self.shape)
                yield name, WeightSlot(kernel, slot.target, convert=_flat)
            else:
                yield name, slot


def _flat(weight: Tensor) -> Tensor:
    return weight.flatten(1)


class PatchLinear(FlatConvolution):
    """Turns each patch of a picture into a vector."""

    def __init__(self, config: Any, bias: bool) -> None:
        side = config.patch_size
        super().__init__((config.num_channels, side, side), config.hidden_size, bias)
        self.patch_size = side

    def patches(self, pixels: Tensor) -> Tensor:
        """[tiles, channels, height, width] float32 -> [tiles, patches, channels * patch_size**2]"""
        pixels = pixels.to(self.dtype)
        return (
            F.unfold(pixels, self.patch_size, stride=self.patch_size).transpose(1, 2).contiguous()
        )


class TowerLayer(nn.Module):
    """Attention of every patch to all of its picture, and an MLP, each behind a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.layer_norm1 = LayerNorm(size, config.layer_norm_eps)
        self.layer_norm2 = LayerNorm(size, config.layer_norm_eps)
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = ColumnParallelLinear(
            size, [Projection.whole(name, size) for name in names], bias=True
        )
        self.out_proj = linear(size, size)
        self.fc1 = linear(size, config.intermediate_size)
        self.fc2 = linear(config.intermediate_size, size)
        self.activate = activation(config.hidden_act)

    def pieces(self, hidden: Tensor) -> Pieces:
        """[patches, hidden_size] of one picture -> the same"""
        projected = yield from in_rows(self._project, products(self.qkv_proj), hidden)
        attended = yield from attend(projected, [(0, len(hidden))])
        hidden = yield from in_rows(self._join, products(self.out_proj), attended, hidden)
        return (yield from in_rows(self._feed_forward, products(self.fc1, self.fc2), hidden))

    def _project(self, hidden: Tensor) -> Tensor:
        projected = self.qkv_proj.forward(self.layer_norm1(hidden))
        return projected.unflatten(1, (3, self.heads, -1))

    def _join(self, attended: Tensor, residual: Tensor) -> Tensor:
        return residual + self.out_proj.forward(attended)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        up = self.activate(self.fc1.forward(self.layer_norm2(hidden)))
        return hidden + self.fc2.forward(up)


class VisionTransformer(nn.Module):
    """The towers of CLIP and SigLIP.

    Args:
        has_class: CLIP's form: a learned vector stands before the patches, and a norm before the
            layers.
    """

    def __init__(self, config: Any, num_layers: int, *, has_class: bool, ends_normed: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_patches = (config.image_size // config.patch_size) ** 2
        self.patch_embedding = PatchLinear(config, bias=not has_class)
        self.position_embedding = parameter(self.num_patches + has_class, size)
        self.class_embedding = parameter(size) if has_class else None
        self.pre_norm = LayerNorm(size, config.layer_norm_eps) if has_class else None
        self.layers = nn.ModuleList(TowerLayer(config) for _ in range(num_layers))
        self.post_norm = LayerNorm(size, config.layer_norm_eps) if ends_normed else None

    def positions(self) -> Tensor:
        """What is added to the patches for their places: [patches, hidden_size]"""
        return self.position_embedding

    def pieces(self, pixels: Tensor) -> Pieces:
        """[channels, height, width] of one picture -> [patches, hidden_size], behind the class
        vector if there is one"""
        (patches,) = self.patch_embedding.patches(pixels[None])
        embedding = self.patch_embedding.proj
        hidden = yield from in_rows(embedding.forward, products(embedding), patches)
        if self.class_embedding is not None:
            hidden = torch.cat((self.class_embedding[None], hidden))
        hidden = hidden + self.positions()
        if self.pre_norm is not None:
            hidden = self.pre_norm(hidden)
        layer: Any
        for layer in self.layers:
            hidden = yield from layer.pieces(hidden)
        return hidden if self.post_norm is None else self.post_norm(hidden)


_NAMES = (
    (r"^vision_model\.", ""),
    (r"^encoder\.", ""),
    (r"\.(self_attn|mlp)\.", "."),
    (r"^embeddings\.", ""),
    (r"^position_embedding\.weight$", "position_embedding"),
    (r"^pre_layrnorm\.", "pre_norm."),
    (r"^post_layernorm\.", "post_norm."),
)


def tower_name(name: str) -> str:
    """Our name of a tensor of CLIP's or SigLIP's tower.

    >>> tower_name("vision_model.encoder.layers.3.self_attn.q_proj.bias")
    'layers.3.q_proj.bias'
    """
    for theirs, ours in _NAMES:
        name = re.sub(theirs, ours, name)
    return name


def weights_digest(module: nn.Module) -> bytes:
    """SHA-256 over names, dtypes, shapes and values of all weights, before they are packed."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return hashed.digest()
