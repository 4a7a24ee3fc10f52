"""Mistral Small 3.1 and Ministral 3: Pixtral's tower (Agrawal et al., 2024), which reads images of
any size, and a projector that joins the patches of squares."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.norm import RMSNorm
from radixrt.models.dense import Ministral3ForCausalLM
from radixrt.models.vision.patches import GatedPatchMLP, PatchAttention, PatchLayer, Turns
from radixrt.models.vision.sees import ImageEncoder, SeesImages
from radixrt.models.vision.tower import PatchLinear, Pieces, activation, in_rows, linear, products

EPS = 1e-5


class PixtralEncoder(ImageEncoder):
    """The projector norms the patches, joins those of a square and has two layers."""

    family = "pixtral"

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        if vision.model_type != "pixtral" or config.vision_feature_layer != -1:
            raise ConfigError(
                f"Not yet: a tower of the type {vision.model_type!r} with 'vision_feature_layer': {config.vision_feature_layer} "
                "beside this language model; served: pixtral, -1."
            )
        self.merge, size = config.spatial_merge_size, vision.hidden_size
        self.unit = vision.patch_size * self.merge
        heads = vision.num_attention_heads
        self.turns = Turns(size // heads, vision.rope_parameters["rope_theta"], between=True)
        self.patch_conv = PatchLinear(vision, bias=False)
        self.ln_pre = RMSNorm(size, EPS)
        names = ("q_proj", "k_proj", "v_proj")
        self.layers = nn.ModuleList(
            PatchLayer(
                (RMSNorm(size, EPS), RMSNorm(size, EPS)),
                PatchAttention(size, heads, names, bias=False),
                GatedPatchMLP(vision, bias=False),
            )
            for _ in range(vision.num_hidden_layers)
        )
        self.norm = RMSNorm(size, config.text_config.rms_norm_eps)
        self.merging_layer = linear(size * self.merge**2, size, bias=False)
        outputs, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.linear_1, self.linear_2 = linear(size, outputs, bias), linear(outputs, outputs, bias)
        self.activate = activation(config.projector_hidden_act)

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        rows, columns = (side // self.patch_conv.patch_size for side in pixels.shape[1:])
        numbers = torch.arange(rows * columns)
        angles = self.turns.angles(numbers // columns, numbers % columns)
        (patches,) = self.patch_conv.patches(pixels[None])
        hidden = yield from in_rows(self._embed, products(self.patch_conv.proj), patches)
        layer: Any
        for layer in self.layers:
            hidden = yield from layer.pieces(hidden, angles, [(0, len(hidden))])
        grid = self.norm.forward(hidden).T.reshape(1, -1, rows, columns)
        squares = F.unfold(grid, self.merge, stride=self.merge)[0].T.contiguous()
        cost = products(self.merging_layer, self.linear_1, self.linear_2)
        return (yield from in_rows(self._project, cost, squares))

    def _embed(self, patches: Tensor) -> Tensor:
        return self.ln_pre.forward(self.patch_conv.proj.forward(patches))

    def _project(self, squares: Tensor) -> Tensor:
        joined = self.merging_layer.forward(squares)
        return self.linear_2.forward(self.activate(self.linear_1.forward(joined)))


_NAMES = (
    (r"^transformer\.", ""),
    (r"\.attention_norm\.", ".norm1."),
    (r"\.ffn_norm\.", ".norm2."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.feed_forward\.", ".mlp."),
    (r"^patch_merger\.", ""),
)


class Mistral3ForConditionalGeneration(SeesImages, Ministral3ForCausalLM):
    """The language model is Ministral 3, or that of Mistral Small 3.1, whose queries keep their
    scale."""

    def make_encoder(self, config: Any) -> ImageEncoder:
        return PixtralEncoder(config)

    def vision_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        if not name.startswith((self.tower, self.projector)):
            return None
        name = name.removeprefix(self.tower).removeprefix(self.projector)
        for theirs, ours in _NAMES:
            name = re.sub(theirs, ours, name)
        return name
