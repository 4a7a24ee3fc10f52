"""Gemma 3 with its eyes: SigLIP's tower, whose patches are averaged to 256, and attention in both
directions inside an image."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.norm import RMSNorm
from radixrt.layers.weights import parameter
from radixrt.models.gemma import Gemma3ForCausalLM
from radixrt.models.vision.sees import ImageEncoder, SeesImages
from radixrt.models.vision.tower import Pieces, VisionTransformer, in_rows


class Gemma3Encoder(ImageEncoder):
    """The averages are normed before they are projected."""

    family = "gemma3"
    whole_images = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        self.side = vision.image_size // vision.patch_size
        few = int(config.mm_tokens_per_image**0.5)
        if few * few != config.mm_tokens_per_image or self.side % few:
            raise ConfigError(
                f"The checkpoint's config.json has 'mm_tokens_per_image': {config.mm_tokens_per_image}, which are no square that "
                f"divides the {self.side} patches of a side."
            )
        self.pooled = self.side // few
        self.vision_tower = VisionTransformer(
            vision, vision.num_hidden_layers, has_class=False, ends_normed=True
        )
        self.tile_size = vision.image_size
        self.tokens_per_tile = few * few
        self.mm_soft_emb_norm = RMSNorm(vision.hidden_size, vision.layer_norm_eps, unit_offset=True)
        size = config.text_config.hidden_size
        self.mm_input_projection_weight = parameter(vision.hidden_size, size)

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        hidden = yield from self.vision_tower.pieces(pixels)
        grid = hidden.T.reshape(1, -1, self.side, self.side)
        pooled = F.avg_pool2d(grid, self.pooled).flatten(2)[0].T.contiguous()
        cost = self.mm_input_projection_weight.numel()
        return (yield from in_rows(self._project, cost, pooled))

    def _project(self, pooled: Tensor) -> Tensor:
        return self.mm_soft_emb_norm.forward(pooled) @ self.mm_input_projection_weight


class Gemma3ForConditionalGeneration(SeesImages, Gemma3ForCausalLM):
    """The language model is that of Gemma 3."""

    def make_encoder(self, config: Any) -> ImageEncoder:
        return Gemma3Encoder(config)

    def reads(self, inner: str) -> bool:
        return not inner.startswith("head.")
