"""LLaVA (Liu et al., 2023): CLIP's or SigLIP's tower, and an MLP of two layers."""

from typing import Any

from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import CausalLM
from radixrt.models.dense import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from radixrt.models.vision.sees import ImageEncoder, SeesImages
from radixrt.models.vision.tower import (
    Pieces,
    VisionTransformer,
    activation,
    in_rows,
    linear,
    products,
)

TOWERS = ("clip_vision_model", "siglip_vision_model")


class LlavaEncoder(ImageEncoder):
    """The projector reads the output of an inner layer of the tower."""

    family = "llava"

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision, layer = config.vision_config, config.vision_feature_layer
        if vision.model_type not in TOWERS:
            raise ConfigError(
                f"Not yet: LLaVA with a vision tower of the type {vision.model_type!r}; served: {', '.join(TOWERS)}."
            )
        if not isinstance(layer, int):
            raise ConfigError("Not yet: LLaVA with 'vision_feature_layer' a list.")
        count = vision.num_hidden_layers
        num_layers = layer if layer >= 0 else count + 1 + layer
        if not 0 <= num_layers <= count:
            raise ConfigError(
                f"The checkpoint's config.json has 'vision_feature_layer': {layer}, but the tower has {count} layers."
            )
        has_class = vision.model_type == TOWERS[0]
        self.vision_tower = VisionTransformer(
            vision, num_layers, has_class=has_class, ends_normed=False
        )
        self.drops_first = config.vision_feature_select_strategy == "default"
        self.tile_size = vision.image_size
        self.tokens_per_tile = self.vision_tower.num_patches + has_class - self.drops_first
        size, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.linear_1 = linear(vision.hidden_size, size, bias)
        self.linear_2 = linear(size, size, bias)
        self.activate = activation(config.projector_hidden_act)

    def tile_pieces(self, pixels: Tensor) -> Pieces:
        hidden = yield from self.vision_tower.pieces(pixels)
        cost = products(self.linear_1, self.linear_2)
        return (yield from in_rows(self._project, cost, hidden[int(self.drops_first) :]))

    def _project(self, hidden: Tensor) -> Tensor:
        return self.linear_2.forward(self.activate(self.linear_1.forward(hidden)))


class Llava(SeesImages):
    """The architecture but for its language model."""

    def make_encoder(self, config: Any) -> ImageEncoder:
        return LlavaEncoder(config)

    def reads(self, inner: str) -> bool:
        """The projector does not depend on tensors behind its layer."""
        if inner.startswith(("post_norm.", "head.")) or self.vision is None:
            return False
        assert isinstance(self.vision, LlavaEncoder)
        _, _, rest = inner.partition("layers.")
        return not rest or int(rest.split(".")[0]) < len(self.vision.vision_tower.layers)


class LlavaLlama(Llava, LlamaForCausalLM):
    """With Llama's language model."""


class LlavaMistral(Llava, MistralForCausalLM):
    """With Mistral's."""


class LlavaQwen2(Llava, Qwen2ForCausalLM):
    """With Qwen 2's."""


_BY_TEXT: dict[str, type[CausalLM]] = {
    "llama": LlavaLlama,
    "mistral": LlavaMistral,
    "qwen2": LlavaQwen2,
}


def LlavaForConditionalGeneration(config: Any, tp: TensorParallel, context_length: int) -> CausalLM:
    """The model of a checkpoint, whose config names the language model.

    Raises:
        ConfigError: that is not served here.
    """
    kind = config.text_config.model_type
    if kind not in _BY_TEXT:
        raise ConfigError(
            f"Not yet: LLaVA with a language model of the type {kind!r}; served: {', '.join(_BY_TEXT)}."
        )
    return _BY_TEXT[kind](config, tp, context_length)
