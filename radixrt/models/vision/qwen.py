"""Qwen2-VL, Qwen2.5-VL (Bai et al., 2025) and Qwen3-VL: a tower that reads images of any size, and
positions in three axes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import AxesRotary, RotaryEmbedding
from radixrt.layers.weights import parameter
from radixrt.models.dense import Qwen2ForCausalLM, Qwen3ForCausalLM
from radixrt.models.encoders import LayerNorm
from radixrt.models.mixtures import Qwen3MoeForCausalLM
from radixrt.models.vision.patches import (
    GatedPatchMLP,
    PatchAttention,
    PatchLayer,
    Turns,
)
from radixrt.models.vision.sees import ImageEncoder, ImageRows, SeesImages
from radixrt.models.vision.tower import (
    FlatConvolution,
    Pieces,
    Segments,
    activation,
    in_rows,
    linear,
    products,
)

EPS = 1e-6


class TwoLayerMLP(nn.Module):
    """A linear layer, an activation, a linear layer."""

    def __init__(self, size: int, inner: int, outputs: int, act: str) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = linear(size, inner), linear(inner, outputs)
        self.activate = activation(act)

    def forward(self, rows: Tensor) -> Tensor:
        """[patches, size] -> [patches, outputs]"""
        return self.linear_fc2.forward(self.activate(self.linear_fc1.forward(rows)))


class Merger(TwoLayerMLP):
    """Joins the patches of a square, which are neighbours, to an embedding.

    Args:
        norm: of a patch, or of a square.
    """

    def __init__(self, config: Any, norm: Any, *, norms_squares: bool = False) -> None:
        size = config.hidden_size * config.spatial_merge_size**2
        super().__init__(size, size, config.out_hidden_size, "gelu")
        self.size, self.norms_squares = size, norms_squares
        self.norm = norm

    def forward(self, rows: Tensor) -> Tensor:
        """[squares, patches of a square * size] -> [squares, out_hidden_size]"""
        if self.norms_squares:
            return super().forward(self.norm.forward(rows))
        patches = rows.view(-1, self.norm.weight.shape[0])
        return super().forward(self.norm.forward(patches).view(-1, self.size))


class QwenEncoder(ImageEncoder):
    """What the towers have in common; a layer has two norms of means and variances and an MLP of two
    matrices, where a family does not say otherwise. The patches come in the order of squares, each of
    which becomes a placeholder."""

    family = "qwen"
    has_axes = True

    def __init__(self, config: Any, bias: bool) -> None:
        super().__init__()
        vision = config.vision_config
        if vision.out_hidden_size != config.text_config.hidden_size:
            raise ConfigError(
                f"The checkpoint's config.json has 'out_hidden_size': {vision.out_hidden_size} in its tower, but embeddings of "
                f"{config.text_config.hidden_size}."
            )
        self.unit = self.merge = vision.spatial_merge_size
        side = vision.patch_size
        kernel = (vision.in_channels, vision.temporal_patch_size, side, side)
        self.patch_embed = FlatConvolution(kernel, vision.hidden_size, bias)
        heads = vision.num_heads
        base = vision.rope_parameters["rope_theta"]
        self.turns = Turns(vision.hidden_size // heads, base)
        self.blocks = nn.ModuleList(
            PatchLayer(
                (self.norm(vision.hidden_size), self.norm(vision.hidden_size)),
                PatchAttention(vision.hidden_size, heads, ("qkv",), bias=True),
                self.mlp(vision),
            )
            for _ in range(vision.depth)
        )

    def norm(self, size: int) -> nn.Module:
        """A norm of the tower."""
        return LayerNorm(size, EPS)

    def mlp(self, vision: Any) -> nn.Module:
        """The MLP of a layer."""
        size = vision.hidden_size
        return TwoLayerMLP(size, vision.intermediate_size, size, vision.hidden_act)

    def embed(self, pixels: Tensor) -> Pieces:
        """[rows, columns, values of a patch] -> [patches, size]"""
        patches, cost = pixels.flatten(0, 1), products(self.patch_embed)
        return (yield from in_rows(self.patch_embed.forward, cost, patches))

    def merged(self, merger: Merger, hidden: Tensor) -> Pieces:
        """[patches, size] -> [squares, out_hidden_size]"""
        return (yield from in_rows(merger.forward, products(merger), self.squares(hidden)))

    def squares(self, patches: Tensor) -> Tensor:
        """[patches, size] -> [squares, patches of a square * size]"""
        return patches.reshape(-1, self.merge**2 * patches.shape[1])

    def places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of the patches, in their order: [patches] of both"""
        merge = self.merge
        order = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
        return _divided(order.transpose(1, 2).flatten(), columns)


def _divided(numbers: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    return numbers // divisor, numbers % divisor


class Qwen2Encoder(QwenEncoder):
    """All patches of an image see one another. The sizes in the config have other names."""

    def __init__(self, config: Any) -> None:
        config = copy.copy(config)
        vision = config.vision_config = copy.copy(config.vision_config)
        vision.out_hidden_size, vision.hidden_size = vision.hidden_size, vision.embed_dim
        vision.intermediate_size = int(vision.embed_dim * vision.mlp_ratio)
        super().__init__(config, bias=False)
        self.merger = Merger(vision, self.norm(vision.hidden_size))

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        rows, columns, _ = pixels.shape
        angles = self.turns.angles(*self.places(rows, columns))
        hidden = yield from self.embed(pixels)
        layer: Any
        for layer in self.blocks:
            hidden = yield from layer.pieces(hidden, angles, [(0, len(hidden))])
        return (yield from self.merged(self.merger, hidden))


class Qwen2_5Encoder(QwenEncoder):
    """Most layers attend within windows, of which those at the right and at the bottom are
    smaller."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, bias=False)
        vision = config.vision_config
        self.window = vision.window_size // vision.spatial_merge_size // vision.patch_size
        self.whole = frozenset(vision.fullatt_block_indexes)
        if self.window < 1:
            raise ConfigError(
                f"The checkpoint's config.json has 'window_size': {vision.window_size}, less than a square of patches."
            )
        self.merger = Merger(vision, self.norm(vision.hidden_size))

    def norm(self, size: int) -> nn.Module:
        return RMSNorm(size, EPS)

    def mlp(self, vision: Any) -> nn.Module:
        return GatedPatchMLP(vision, bias=True)

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        rows, columns, _ = pixels.shape
        order, windows = self._windows(rows // self.merge, columns // self.merge)
        yield  # of the largest image, this and the angles take some ten milliseconds each
        angles = self.squares(self.turns.angles(*self.places(rows, columns)))[order]
        angles = angles.view(rows * columns, -1)
        yield
        hidden = yield from self.embed(pixels)
        squares = self.squares(hidden)
        ordered = yield from in_rows(squares.__getitem__, squares.shape[1], order)
        hidden = ordered.view(rows * columns, -1)
        layer: Any
        for index, layer in enumerate(self.blocks):
            segments = [(0, len(hidden))] if index in self.whole else windows
            hidden = yield from layer.pieces(hidden, angles, segments)
        merged = yield from self.merged(self.merger, hidden)
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, Segments]:
        """The order of squares by windows [squares], and the patches of each window."""
        row, column = _divided(torch.arange(rows * columns), columns)
        window = row // self.window * columns + column // self.window
        order = window.argsort(stable=True)
        ends = window.unique(return_counts=True)[1].cumsum(0) * self.merge**2
        return order, list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


class Qwen3Encoder(QwenEncoder):
    """The outputs of some layers are merged too (DeepStack, Meng et al., 2024). A grid of learned
    positions is stretched over each image."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, bias=True)
        vision = config.vision_config
        self.deep = list(getattr(vision, "deepstack_visual_indexes", ()))
        if len(self.deep) >= config.text_config.num_hidden_layers:
            raise ConfigError(
                f"The checkpoint's config.json has 'deepstack_visual_indexes': {self.deep}, as many as the language model has layers."
            )
        self.feature_layers = 1 + len(self.deep)
        self.side = int(vision.num_position_embeddings**0.5)
        self.pos_embed = parameter(vision.num_position_embeddings, vision.hidden_size)
        self.merger = Merger(vision, self.norm(vision.hidden_size))
        square = vision.hidden_size * self.merge**2
        self.deepstack_merger_list = nn.ModuleList(
            Merger(vision, self.norm(square), norms_squares=True) for _ in self.deep
        )

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        rows, columns, _ = pixels.shape
        places = self.places(rows, columns)
        angles = self.turns.angles(*places)
        hidden = yield from self.embed(pixels)
        grid = (
            torch.linspace(0, self.side - 1, count)[place]
            for count, place in zip((rows, columns), places, strict=True)
        )
        hidden = yield from in_rows(self._placed, hidden.shape[1], hidden, *grid)
        outputs = {}
        layer: Any
        for index, layer in enumerate(self.blocks):
            hidden = yield from layer.pieces(hidden, angles, [(0, len(hidden))])
            if index in self.deep:
                outputs[index] = hidden
        merged = yield from self.merged(self.merger, hidden)
        features = [merged]
        merger: Any
        for index, merger in zip(self.deep, self.deepstack_merger_list, strict=True):
            features.append((yield from self.merged(merger, outputs[index])))
        cost = self.feature_layers * merged.shape[1]
        return (yield from in_rows(lambda *layers: torch.cat(layers, 1), cost, *features))

    def _placed(self, patches: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Add the learned positions, bilinear between the four around each patch: [patches, size]

        Args:
            row, column: [patches] float32, places in the grid of learned positions.
        """
        position = torch.zeros(patches.shape)
        for y, y_part in _ends(row, self.side):
            for x, x_part in _ends(column, self.side):
                learned = self.pos_embed[y * self.side + x].float()
                position += learned * (y_part * x_part)[:, None]
        return patches + position.to(patches.dtype)


def _ends(places: Tensor, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The whole numbers around places, and the part that each has: [n] of all four"""
    low = places.long()
    part = places - low
    return (low, 1 - part), ((low + 1).clamp(max=count - 1), part)


class QwenVL(SeesImages):
    """The architectures but for tower and layers."""

    mixed_axes = True
    """See ``AxesRotary``."""
    encoder_class: Callable[[Any], ImageEncoder]

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        text = config.text_config
        if not hasattr(text, "tie_word_embeddings"):  # in configs of one level
            text.tie_word_embeddings = config.tie_word_embeddings
        super().__init__(config, tp, context_length)

    def rotary(self, context_length: int, layer_type: str | None) -> RotaryEmbedding:
        if "mrope_section" not in self.config.rope_parameters:
            return super().rotary(context_length, layer_type)
        return AxesRotary(self.config, context_length, mixed=self.mixed_axes, by_parts=True)

    def make_encoder(self, config: Any) -> ImageEncoder:
        if not isinstance(self._rotaries[0], AxesRotary):
            raise ConfigError(
                "The checkpoint's config.json has no 'mrope_section' in 'rope_parameters', so the positions of images are unknown."
            )
        return self.encoder_class(config)

    def _at(self, positions: Tensor, images: ImageRows) -> AbstractContextManager[None]:
        if images.axes is None:
            return nullcontext()
        (rotary,) = self._rotaries
        assert isinstance(rotary, AxesRotary)
        return rotary.at(positions.expand(3, -1).index_copy(1, images.rows, images.axes))

    def vision_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        if not name.startswith("visual."):
            return None
        name = name.removeprefix("visual.").replace("patch_embed.proj.", "patch_embed.")
        return name.replace("pos_embed.weight", "pos_embed")


class Qwen2_5_VLForConditionalGeneration(QwenVL, Qwen2ForCausalLM):
    """The language model is that of Qwen 2."""

    mixed_axes = False
    encoder_class: Callable[[Any], ImageEncoder] = Qwen2_5Encoder

    def vision_name(self, name: str) -> str | None:
        found = super().vision_name(name)
        if found is None:
            return None
        for theirs, ours in (("ln_q", "norm"), ("mlp.0", "linear_fc1"), ("mlp.2", "linear_fc2")):
            found = found.replace(f"merger.{theirs}.", f"merger.{ours}.")
        return found


class Qwen2VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    """An older tower."""

    encoder_class = Qwen2Encoder

    def vision_name(self, name: str) -> str | None:
        found = super().vision_name(name)
        return found and found.replace(".mlp.fc", ".mlp.linear_fc")


class Qwen3VLForConditionalGeneration(QwenVL, Qwen3ForCausalLM):
    """The language model is that of Qwen 3."""

    encoder_class = Qwen3Encoder

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        return {"qkv_bias": bias, "output_bias": bias, **self.head_norms()}


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration, Qwen3MoeForCausalLM):
    """The language model is that of Qwen 3 with experts. Published checkpoints have their matrices
    transposed, later ones have not, and the shape tells which: [experts, outputs, inputs] here."""

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        hidden, size = self.config.hidden_size, self.config.moe_intermediate_size
        outputs = {"gate_up_proj": 2 * size, "down_proj": hidden}
        is_stack = ".mlp.experts." in name and tensor.dim() == 3
        if is_stack and tensor.shape[1] != outputs[name.removesuffix(".weight").split(".")[-1]]:
            tensor = tensor.transpose(1, 2)
        yield from super().translate(name, tensor)
