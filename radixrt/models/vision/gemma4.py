"""Gemma 4 with its eyes: a tower that reads images of any size, whose patches are averaged over
squares, and attention in both directions inside an image in the layers with a window."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.base.errors import ConfigError
from radixrt.layers.norm import RMSNorm
from radixrt.layers.weights import WeightSlot, parameter
from radixrt.models.gemma4 import Gemma4ForCausalLM
from radixrt.models.vision.patches import Turns, turn
from radixrt.models.vision.sees import ImageEncoder, ImageRows, SeesImages
from radixrt.models.vision.tower import (
    Pieces,
    Segments,
    activation,
    attend,
    in_rows,
    linear,
    products,
)


class ClippedLinear(nn.Module):
    """A linear layer whose inputs and outputs are clipped, if the config says so."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = linear(inputs, outputs, bias=False)
        self.bounds = parameter(4, 1) if config.use_clipped_linears else None
        """Least and greatest input, least and greatest output."""

    def forward(self, rows: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]"""
        if self.bounds is None:
            return self.linear.forward(rows)
        least_in, most_in, least_out, most_out = self.bounds
        return self.linear.forward(rows.clamp(least_in, most_in)).clamp(least_out, most_out)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield from self.linear.weight_slots(f"{path}.linear")
        if self.bounds is not None:
            for name, bound in zip(_BOUNDS, self.bounds, strict=True):
                yield f"{path}.{name}", WeightSlot((), bound, convert=_in_a_list)


_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _in_a_list(number: Tensor) -> Tensor:
    return number.reshape(1)


class Gemma4TowerLayer(nn.Module):
    """Attention and a gated MLP, each between two norms. Heads are normed, and scores have no
    factor."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.heads: int = config.num_attention_heads
        width = self.heads * dim
        self.q_proj, self.k_proj, self.v_proj = (
            ClippedLinear(config, size, width) for _ in range(3)
        )
        self.o_proj = ClippedLinear(config, width, size)
        self.q_norm, self.k_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.v_norm = RMSNorm(dim, eps, learned=False)
        self.gate_proj, self.up_proj = (
            ClippedLinear(config, size, config.intermediate_size) for _ in range(2)
        )
        self.down_proj = ClippedLinear(config, config.intermediate_size, size)
        self.activate = activation(config.hidden_activation)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)

    def pieces(self, hidden: Tensor, angles: Tensor, segments: Segments) -> Pieces:
        """[patches, size] of an image -> the same"""
        cost = products(self.q_proj, self.k_proj, self.v_proj)
        projected = yield from in_rows(self._project, cost, hidden, angles)
        attended = yield from attend(projected, segments, scale=1.0)
        hidden = yield from in_rows(self._join, products(self.o_proj), attended, hidden)
        cost = products(self.gate_proj, self.up_proj, self.down_proj)
        return (yield from in_rows(self._feed_forward, cost, hidden))

    def _project(self, rows: Tensor, angles: Tensor) -> Tensor:
        normed = self.input_layernorm.forward(rows)
        query, key, value = (
            norm.forward(proj.forward(normed).unflatten(1, (self.heads, -1)))
            for proj, norm in (
                (self.q_proj, self.q_norm),
                (self.k_proj, self.k_norm),
                (self.v_proj, self.v_norm),
            )
        )
        return torch.stack((_turned(query, angles), _turned(key, angles), value), 1)

    def _join(self, attended: Tensor, residual: Tensor) -> Tensor:
        return residual + self.post_attention_layernorm.forward(self.o_proj.forward(attended))

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = self.pre_feedforward_layernorm.forward(hidden)
        gated = self.activate(self.gate_proj.forward(normed)) * self.up_proj.forward(normed)
        return hidden + self.post_feedforward_layernorm.forward(self.down_proj.forward(gated))


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    """The halves of heads turn by column and row: each has pairs of its own."""
    pairs = zip(heads.chunk(2, dim=-1), angles.chunk(2, dim=-1), strict=True)
    return torch.cat([turn(half, radians) for half, radians in pairs], -1)


class Gemma4Encoder(ImageEncoder):
    """Patches have learned positions too, of column and row."""

    family = "gemma4"

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision, text = config.vision_config, config.text_config
        if vision.num_key_value_heads != vision.num_attention_heads:
            raise ConfigError(
                "Not yet: a tower of Gemma 4 with fewer heads of keys than of queries."
            )
        self.unit = vision.pooling_kernel_size
        self.whole_images = text.use_bidirectional_attention == "vision"
        size = vision.hidden_size
        self.factor = size**0.5
        self.input_proj = linear(3 * vision.patch_size**2, size, bias=False)
        self.position_embedding_table = parameter(2, vision.position_embedding_size, size)
        self.turns = Turns(vision.head_dim, vision.rope_parameters["rope_theta"])
        self.layers = nn.ModuleList(
            Gemma4TowerLayer(vision) for _ in range(vision.num_hidden_layers)
        )
        self.standardizes = vision.standardize
        if self.standardizes:
            self.std_bias, self.std_scale = parameter(size), parameter(size)
        self.norm = RMSNorm(size, vision.rms_norm_eps, learned=False)
        self.embedding_projection = linear(size, text.hidden_size, bias=False)

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        rows, columns, _ = pixels.shape
        numbers = torch.arange(rows * columns)
        row, column = numbers // columns, numbers % columns
        places = self.position_embedding_table[0][column] + self.position_embedding_table[1][row]
        angles = self.turns.angles(column, row)
        cost = products(self.input_proj)
        hidden = yield from in_rows(self._embed, cost, pixels.flatten(0, 1), places)
        layer: Any
        for layer in self.layers:
            hidden = yield from layer.pieces(hidden, angles, [(0, len(hidden))])
        unit = self.unit
        grid = hidden.float().view(rows // unit, unit, columns // unit, unit, -1)
        squares = grid.mean((1, 3)).flatten(0, 1) * self.factor
        if self.standardizes:
            squares = (squares - self.std_bias.float()) * self.std_scale.float()
        cost = products(self.embedding_projection)
        return (yield from in_rows(self._output, cost, squares.to(hidden.dtype)))

    def _embed(self, patches: Tensor, places: Tensor) -> Tensor:
        return self.input_proj.forward(2 * (patches.to(places.dtype) - 0.5)) + places

    def _output(self, squares: Tensor) -> Tensor:
        return self.embedding_projection.forward(self.norm.forward(squares))


_NAMES = (
    (r"^(vision_tower|embed_vision)\.", ""),
    (r"^(patch_embedder|encoder)\.", ""),
    (r"\.(self_attn|mlp)\.", "."),
)


class Gemma4ForConditionalGeneration(SeesImages, Gemma4ForCausalLM):
    """The language model is that of Gemma 4."""

    def make_encoder(self, config: Any) -> ImageEncoder:
        return Gemma4Encoder(config)

    def vision_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        if not name.startswith(("vision_tower.", "embed_vision.")):
            return None
        for theirs, ours in _NAMES:
            name = re.sub(theirs, ours, name)
        return name

    @torch.inference_mode()
    def forward_with_images(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
        images: ImageRows,
    ) -> Tensor:
        """Where layers have inputs for each token, those of placeholders are the padding's."""
        hidden = self.embed(input_ids).index_copy(0, images.rows, images.features)
        ids = input_ids.index_fill(0, images.rows, self.config.pad_token_id)
        return self._run(ids, hidden, positions, context, rows, narrows=False)
