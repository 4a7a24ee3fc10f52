"""Idefics 3 (Laurençon et al., 2024) and SmolVLM: SigLIP's tower on tiles of an image, and a
projector that joins neighbouring patches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.models.dense import LlamaForCausalLM
from radixrt.models.vision.sees import ImageEncoder, SeesImages
from radixrt.models.vision.tower import Pieces, VisionTransformer, in_rows, linear, products


class TileTransformer(VisionTransformer):
    """A row of the position table stands for a part of the picture's height and width."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_hidden_layers, has_class=False, ends_normed=True)
        side = config.image_size // config.patch_size
        bounds = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32)
        parts = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        places = torch.bucketize(parts.clamp(max=1.0 - 1e-6), bounds, right=True)
        rows = (places[:, None] * side + places).flatten()
        self._rows: Tensor
        self.register_buffer("_rows", rows, persistent=False)

    def positions(self) -> Tensor:
        return self.position_embedding[self._rows]


class TileEncoder(ImageEncoder):
    """Each tile, and the whole image behind them, is a picture of its own."""

    family = "idefics3"

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision, self.factor = config.vision_config, config.scale_factor
        self.side = vision.image_size // vision.patch_size
        if self.side % self.factor:
            raise ConfigError(
                f"The checkpoint's config.json has 'scale_factor': {self.factor}, which does not divide the {self.side} patches of "
                "a side."
            )
        self.vision_model = TileTransformer(vision)
        self.tile_size = vision.image_size
        self.tokens_per_tile = (self.side // self.factor) ** 2
        size = vision.hidden_size * self.factor**2
        self.proj = linear(size, config.text_config.hidden_size, bias=False)

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        hidden = yield from self.vision_model.pieces(pixels)
        return (yield from in_rows(self.proj.forward, products(self.proj), self._joined(hidden)))

    def _joined(self, hidden: Tensor) -> Tensor:
        """The patches of each square, side by side: [patches, size] -> [patches / factor**2, size *
        factor**2]"""
        few, factor = self.side // self.factor, self.factor
        squares = hidden.view(few, factor, few, factor, -1).transpose(1, 2)
        return squares.reshape(few * few, -1)


class Idefics3ForConditionalGeneration(SeesImages, LlamaForCausalLM):
    """The language model is Llama's."""

    projector, tower = "connector.modality_projection.", "vision_model."

    def make_encoder(self, config: Any) -> ImageEncoder:
        if config.text_config.model_type != "llama":
            raise ConfigError(
                f"Not yet: a language model of the type {config.text_config.model_type!r} beside this tower; served: llama."
            )
        return TileEncoder(config)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from super().translate(name.replace("model.text_model.", "model.", 1), tensor)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """The same architecture."""
