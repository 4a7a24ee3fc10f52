"""Reads files ``mmproj-*.gguf``, which hold the vision tower of a GGUF model: their metadata become
the parts of config.json and preprocessor_config.json that a checkpoint with images has.

A tower is known by llama.cpp's name of its projector. What the metadata do not say is what all
published checkpoints of the family have in common.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from radixrt.base.errors import ConfigError
from radixrt.models.gguf.file import GGUFFile, read_header


class Tower(NamedTuple):
    """A tower, and what it adds to the files of a checkpoint folder."""

    file: GGUFFile
    config: dict[str, Any]
    """The content of config.json."""
    processor: dict[str, Any]
    """The content of preprocessor_config.json."""


class _Clip:
    """The metadata and the tensors of a tower's file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"clip.vision.{key}", default)

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ConfigError(f"{self.file.files[0]} has no clip.vision.{key} in its metadata.")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    @property
    def projector(self) -> str | None:
        """llama.cpp's name of it, which the oldest files of LLaVA lack."""
        metadata = self.file.metadata
        name = metadata.get("clip.projector_type") or self.get("projector_type")
        return name or ("mlp" if metadata.get("clip.has_llava_projector") else None)

    @property
    def feature_size(self) -> int:
        """Numbers of a feature; LLaVA's metadata have those of CLIP's own projection."""
        if self.projector == "mlp" and self.has("mm.2.weight"):
            return self.file.tensors["mm.2.weight"].shape[0]
        return int(self.need("projection_dim"))

    @property
    def act(self) -> str:
        """llama.cpp's GELU is the approximation by tanh."""
        return "silu" if self.file.metadata.get("clip.use_silu") else "gelu_pytorch_tanh"

    @property
    def sizes(self) -> dict[str, Any]:
        """As most towers' configs name them."""
        return {
            "hidden_size": self.need("embedding_length"),
            "intermediate_size": self.need("feed_forward_length"),
            "num_hidden_layers": self.need("block_count"),
            "num_attention_heads": self.need("attention.head_count"),
            "image_size": self.need("image_size"),
            "patch_size": self.need("patch_size"),
            "num_channels": 3,
            "hidden_act": self.act,
            "layer_norm_eps": self.need("attention.layer_norm_epsilon"),
        }

    @property
    def qwen_sizes(self) -> dict[str, Any]:
        """As Qwen's configs name them."""
        names = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
        sizes = {names.get(name, name): value for name, value in self.sizes.items()}
        return sizes | {
            "in_channels": 3,
            "out_hidden_size": self.need("projection_dim"),
            "spatial_merge_size": self.get("spatial_merge_size", 2),
            "temporal_patch_size": 2,
        }


class _Family(NamedTuple):
    texts: tuple[str, ...]
    """llama.cpp's architectures of its language models."""
    placeholder: str
    """The token of an image's positions."""
    config_of: Callable[[_Clip, dict[str, Any]], dict[str, Any]]
    """config.json but for what all have, given the language model's."""
    processor_of: Callable[[_Clip], dict[str, Any]]


def _gemma3(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    side = clip.need("image_size") // clip.need("patch_size")
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": (side // clip.get("projector.scale_factor", 4)) ** 2,
        "vision_config": {"model_type": "siglip_vision_model", **clip.sizes},
    }


def _gemma3_processor(clip: _Clip) -> dict[str, Any]:
    side = clip.need("image_size")
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        "resample": 2,
    }


def _gemma4(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    """The smaller models, whose layers have inputs for each token, see images causally."""
    if not text["hidden_size_per_layer_input"]:
        text["use_bidirectional_attention"] = "vision"
    names = {"hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps"}
    sizes = {names.get(name, name): value for name, value in clip.sizes.items()}
    head_dim = clip.file.tensors["v.blk.0.attn_q.weight"].shape[0] // sizes["num_attention_heads"]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "vision_config": {
            "model_type": "gemma4_vision",
            **sizes,
            "head_dim": head_dim,
            "num_key_value_heads": clip.file.tensors["v.blk.0.attn_k.weight"].shape[0] // head_dim,
            "pooling_kernel_size": clip.get("projector.scale_factor", 3),
            "position_embedding_size": clip.file.tensors["v.position_embd.weight"].shape[1],
            "use_clipped_linears": clip.has("v.blk.0.attn_q.input_max"),
            "standardize": clip.has("v.std_bias"),
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    }


def _gemma4_processor(clip: _Clip) -> dict[str, Any]:
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": clip.need("patch_size"),
        "pooling_kernel_size": clip.get("projector.scale_factor", 3),
        "max_soft_tokens": 280,
    }


def _llava(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    """CLIP's tower or SigLIP's, up to the layer that the projector reads."""
    newline = clip.has("model.image_newline") or clip.has("v.image_newline")
    if newline or clip.get("image_grid_pinpoints") or clip.has("mm.3.weight"):
        raise ConfigError(f"Not yet: {clip.file.files[0]}, a tower of LLaVA-NeXT or LLaVA-Yi.")
    sizes = clip.sizes
    layers = clip.get("feature_layer") or [sizes["num_hidden_layers"]]
    if len(layers) > 1:
        raise ConfigError(
            f"Not yet: {clip.file.files[0]}, whose projector reads several layers of the tower."
        )
    act, is_clip = "gelu_pytorch_tanh", clip.has("v.class_embd")
    if is_clip:
        act = "gelu" if clip.file.metadata.get("clip.use_gelu") else "quick_gelu"
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_feature_layer": layers[0],
        "vision_feature_select_strategy": "default" if is_clip else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": clip.has("mm.0.bias"),
        "vision_config": {
            "model_type": f"{'clip' if is_clip else 'siglip'}_vision_model",
            **sizes,
            "hidden_act": act,
        },
    }


def _llava_processor(clip: _Clip) -> dict[str, Any]:
    side = clip.need("image_size")
    square = {"height": side, "width": side}
    if not clip.has("v.class_embd"):
        return {"image_processor_type": "SiglipImageProcessor", "size": square, "resample": 3}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": square,
    }


def _idefics3(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "scale_factor": clip.need("projector.scale_factor"),
        "vision_config": {"model_type": "smolvlm_vision", **clip.sizes},
    }


def _idefics3_processor(clip: _Clip) -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": clip.get("preproc_image_size", 4 * clip.need("image_size"))},
        "max_image_size": {"longest_edge": clip.need("image_size")},
    }


def _pixtral(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    if not clip.has("mm.patch_merger.weight"):
        raise ConfigError(f"Not yet: {clip.file.files[0]}, a tower of Pixtral 12B.")
    if text["model_type"] == "llama":  # Mistral Small 3.1 in older files
        text |= {"model_type": "mistral", "sliding_window": None}
    sizes = clip.sizes
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "spatial_merge_size": clip.get("spatial_merge_size", 2),
        "vision_feature_layer": -1,
        "multimodal_projector_bias": clip.has("mm.1.bias"),
        "projector_hidden_act": "gelu",
        "vision_config": {
            "model_type": "pixtral",
            **sizes,
            "hidden_act": "silu" if clip.act == "silu" else "gelu",
            "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
            "rope_parameters": rope,
        },
    }


def _pixtral_processor(clip: _Clip) -> dict[str, Any]:
    return {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": clip.need("image_size")},
        "patch_size": clip.need("patch_size"),
    }


def _qwen(kind: str, architecture: str, text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    if "mrope_section" not in text["rope_parameters"]:
        raise ConfigError(
            "The GGUF file has no rope.dimension_sections in its metadata, so the positions of images are unknown."
        )
    text["model_type"] = f"{kind}_text"
    return {"architectures": [architecture], "model_type": kind, "vision_config": vision}


def _qwen2_vl(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    """The metadata have another size in the place of the MLPs' own."""
    sizes = clip.qwen_sizes
    size = sizes["hidden_size"]
    return _qwen(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        text,
        **sizes
        | {
            "embed_dim": size,
            "hidden_size": sizes["out_hidden_size"],
            "mlp_ratio": max(clip.file.tensors["v.blk.0.ffn_up.weight"].shape) // size,
            "hidden_act": "quick_gelu",
        },
    )


def _qwen2_5_vl(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    """Every so many layers attend to all of the image; the size of windows is not in the
    metadata."""
    sizes, period = clip.qwen_sizes, clip.need("n_wa_pattern")
    return _qwen(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        text,
        **sizes,
        window_size=clip.get("window_size", 112),
        fullatt_block_indexes=list(range(period - 1, sizes["depth"], period)),
    )


def _qwen3_vl(clip: _Clip, text: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-VL and Qwen3.5, dense or with experts."""
    kind = {"qwen3": "qwen3_vl", "qwen3_moe": "qwen3_vl_moe"}.get(text["model_type"])
    deep = {}
    if kind is None:
        kind = text["model_type"].removesuffix("_text")
    else:
        layers = clip.get("is_deepstack_layers", [])
        deep = {"deepstack_visual_indexes": [i for i, is_deep in enumerate(layers) if is_deep]}
    is_moe = kind.endswith("_moe")
    name = {"qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}[kind.removesuffix("_moe")]
    return _qwen(
        kind,
        f"{name}{'Moe' if is_moe else ''}ForConditionalGeneration",
        text,
        **clip.qwen_sizes,
        **deep,
        num_position_embeddings=clip.file.tensors["v.position_embd.weight"].shape[0],
    )


def _qwen_processor(least: int, most: int) -> Callable[[_Clip], dict[str, Any]]:
    """
    Args:
        least: pixels of an image, if the metadata do not say.
        most: likewise.
    """

    def processor_of(clip: _Clip) -> dict[str, Any]:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": clip.need("patch_size"),
            "merge_size": clip.get("spatial_merge_size", 2),
            "temporal_patch_size": 2,
            "size": {
                "shortest_edge": clip.get("image_min_pixels", least),
                "longest_edge": clip.get("image_max_pixels", most),
            },
        }

    return processor_of


_OLDER_QWEN = _qwen_processor(56 * 56, 28 * 28 * 16384)
_FAMILIES = {
    "gemma3": _Family(("gemma3",), "<image_soft_token>", _gemma3, _gemma3_processor),
    "gemma4v": _Family(("gemma4",), "<|image|>", _gemma4, _gemma4_processor),
    "mlp": _Family(("llama", "qwen2"), "<image>", _llava, _llava_processor),
    "idefics3": _Family(("llama",), "<image>", _idefics3, _idefics3_processor),
    "pixtral": _Family(("mistral3", "llama"), "[IMG]", _pixtral, _pixtral_processor),
    "qwen2vl_merger": _Family(("qwen2vl",), "<|image_pad|>", _qwen2_vl, _OLDER_QWEN),
    "qwen2.5vl_merger": _Family(("qwen2vl",), "<|image_pad|>", _qwen2_5_vl, _OLDER_QWEN),
    "qwen3vl_merger": _Family(
        ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
        "<|image_pad|>",
        _qwen3_vl,
        _qwen_processor(1 << 16, 1 << 24),
    ),
}
"""What each kind of tower is read as, by llama.cpp's name of its projector."""


def find_tower(file: GGUFFile, config: dict[str, Any], paths: list[Path]) -> Tower | str:
    """The first of the towers that fits a language model, or the reason why the first one does not.

    Args:
        config: the language model's.
    """
    reason = ""
    for path in paths:
        try:
            return read_tower(file, config, path)
        except ConfigError as error:
            reason = reason or str(error)
    return reason


def read_tower(file: GGUFFile, config: dict[str, Any], path: Path) -> Tower:
    """The tower of a language model.

    Raises:
        ConfigError: the file can't be read, its projector is not served, or it belongs to another
            language model.
    """
    read = read_header(path)
    clip = _Clip(read)
    name = clip.projector
    if name not in _FAMILIES:
        raise ConfigError(
            f"Not yet: {path}, with a projector of the kind {name!r}; served: {', '.join(_FAMILIES)}."
        )
    family, size = _FAMILIES[name], config["hidden_size"]
    architecture = file.metadata.get("general.architecture")
    if architecture not in family.texts or clip.feature_size != size:
        raise ConfigError(
            f"{path} is no tower of {file.files[0]}: it belongs to a model of {' or '.join(family.texts)} with embeddings of "
            f"{clip.feature_size}, and this is {architecture} with embeddings of {size}."
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if family.placeholder not in tokens:
        raise ConfigError(
            f"{file.files[0]} has no token {family.placeholder}, which stands for images."
        )
    text = {key: value for key, value in config.items() if key != "architectures"}
    if sections := file.metadata.get(f"{architecture}.rope.dimension_sections"):
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": sections[:3]}
    return Tower(
        read,
        family.config_of(clip, text)
        | {
            "image_token_id": tokens.index(family.placeholder),
            "text_config": text,
            **{key: config[key] for key in ("dtype", "eos_token_id", "tie_word_embeddings")},
        },
        family.processor_of(clip)
        | {"image_mean": clip.need("image_mean"), "image_std": clip.need("image_std")},
    )
