"""Writes the towers of tiny checkpoints as ``mmproj-*.gguf``, with the metadata, the names and the
layouts of llama.cpp's converters (its folder ``conversion``; LLaVA's is
``convert_image_encoder_to_gguf.py``) by the package ``gguf``."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from torch import Tensor

Kind = gguf.GGMLQuantizationType
_LLAVA_PROJECTOR = "multi_modal_projector.linear_"
_BOUNDS = (".input_min", ".input_max", ".output_min", ".output_max")
_PROJECTORS = {
    "gemma3": gguf.VisionProjectorType.GEMMA3,
    "smolvlm": gguf.VisionProjectorType.IDEFICS3,
    "mistral3": gguf.VisionProjectorType.PIXTRAL,
    "qwen2_vl": gguf.VisionProjectorType.QWEN2VL,
    "qwen2_5_vl": gguf.VisionProjectorType.QWEN25VL,
    "qwen3_vl": gguf.VisionProjectorType.QWEN3VL,
    "qwen3_vl_moe": gguf.VisionProjectorType.QWEN3VL,
    "qwen3_5": gguf.VisionProjectorType.QWEN3VL,
}


def write_mmproj(
    checkpoint: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    *,
    swapped: bool = False,
    rounded: bool = False,
    projection_dim: int | None = None,
    arrays: dict[str, list[int]] | None = None,
) -> Path:
    """Write the tower of a checkpoint and return its path.

    Args:
        kind: of the matrices, or a function of a matrix's name in the file.
        swapped: name the projections of MLPs as files of before 2025 do.
        rounded: store what the package dequantizes, in float32.
        projection_dim: of a tower for another model.
        arrays: metadata in the place of the converter's.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    if family in _PROJECTORS:
        writer.add_clip_projector_type(_PROJECTORS[family])
    writer.add_vision_projection_dim(projection_dim or config["text_config"]["hidden_size"])
    _add_sizes(writer, config)
    files = ("preprocessor_config.json", "processor_config.json")
    found = [json.loads(file.read_text()) for file in map(checkpoint.joinpath, files) if file.is_file()]  # fmt: skip
    settings = {name: value for one in found for name, value in (one | one.get("image_processor", {})).items()}  # fmt: skip
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    _ADD[family](writer, config, settings)
    for key, array in (arrays or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_array(key, array)
    depth = _depth(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        for theirs, part in _parts(family, config, name, tensor.float(), names):
            if swapped or family == "llava":
                theirs = re.sub("ffn_(up|down)", _swap, theirs)
            values = part.contiguous().numpy()
            of = kind(theirs) if callable(kind) else kind
            if values.ndim < 2 or "position_embd" in theirs:
                of = Kind.F32  # llama.cpp adds no others
            elif values.shape[-1] % 32 and of != Kind.F16:
                of = Kind.F32
            stored = gguf.quantize(values, of)
            if rounded:
                stored, of = gguf.dequantize(stored, of), Kind.F32
            writer.add_tensor(theirs, stored, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _swap(found: re.Match[str]) -> str:
    return "ffn_down" if found[1] == "up" else "ffn_up"


def _depth(config: dict[str, Any]) -> int:
    """Layers of the tower in the file: LLaVA's end with the one that the projector reads."""
    vision = config["vision_config"]
    depth: int = vision.get("num_hidden_layers") or vision["depth"]
    layer = config.get("vision_feature_layer", -1) if config["model_type"] == "llava" else -1
    return layer if layer >= 0 else depth + 1 + layer


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    vision, text = config["vision_config"], config["text_config"]
    is_qwen = config["model_type"].startswith("qwen")
    side = vision.get("image_size") or 560
    if "num_position_embeddings" in vision:
        side = int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    writer.add_vision_image_size(side)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision.get("embed_dim") or vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision.get("intermediate_size") or vision["hidden_size"])
    writer.add_vision_block_count(_depth(config))
    writer.add_vision_head_count(vision.get("num_attention_heads") or vision["num_heads"])
    eps = text["rms_norm_eps"] if is_qwen else vision.get("layer_norm_eps", 1e-6)
    writer.add_vision_attention_layernorm_eps(eps)


def _add_gemma3(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    writer.add_vision_use_gelu(True)
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    writer.add_vision_projector_scale_factor(side // int(settings["image_seq_length"] ** 0.5))


def _add_gemma4(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    """The converter leaves the factor out, which is 3 in all published models."""
    writer.add_clip_vision_projector_type(gguf.VisionProjectorType.GEMMA4V)
    writer.add_vision_projector_scale_factor(config["vision_config"]["pooling_kernel_size"])


def _add_llava(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    """As the oldest files have it, without a projector's name. The size is that of CLIP's own
    projection, and 0 for SigLIP."""
    vision = config["vision_config"]
    writer.add_bool("clip.has_llava_projector", True)
    writer.kv_data[0].pop("clip.vision.projection_dim")
    writer.add_vision_projection_dim(vision.get("projection_dim", 0))
    writer.add_vision_use_gelu(vision["hidden_act"] == "gelu")
    writer.add_array("clip.vision.feature_layer", [_depth(config)])


def _add_smolvlm(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_preproc_image_size(settings["size"]["longest_edge"])


def _add_mistral3(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    is_silu = config["vision_config"]["hidden_act"] == "silu"
    (writer.add_vision_use_silu if is_silu else writer.add_vision_use_gelu)(True)
    writer.add_vision_spatial_merge_size(config["spatial_merge_size"])


def _add_qwen2_5_vl(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    writer.add_vision_use_silu(True)
    writer.add_vision_n_wa_pattern(config["vision_config"]["fullatt_block_indexes"][0] + 1)


def _add_qwen3_vl(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    vision = config["vision_config"]
    deep = vision.get("deepstack_visual_indexes", [])
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_is_deepstack_layers([i in deep for i in range(vision["depth"])])
    writer.add_vision_min_pixels(settings["size"]["shortest_edge"])
    writer.add_vision_max_pixels(settings["size"]["longest_edge"])


_ADD = {
    "gemma3": _add_gemma3,
    "gemma4": _add_gemma4,
    "llava": _add_llava,
    "smolvlm": _add_smolvlm,
    "mistral3": _add_mistral3,
    "qwen2_vl": lambda *_: None,
    "qwen2_5_vl": _add_qwen2_5_vl,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), _add_qwen3_vl),
}


def _parts(
    family: str, config: dict[str, Any], name: str, tensor: Tensor, names: gguf.TensorNameMap
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file that the converter makes of one of the checkpoint."""
    if not any(part in name for part in ("vision_tower", "embed_vision", "visual.", "vision_model", "multi_modal_projector", "connector")):  # fmt: skip
        return

    def theirs(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias", *_BOUNDS))
        assert found, name
        return found

    if family == "smolvlm":
        yield theirs(name), tensor
        return
    if family == "gemma4":
        if tensor.ndim == 0:
            tensor = tensor[None]
        if name.endswith("input_proj.weight"):
            side = config["vision_config"]["patch_size"]
            tensor = tensor.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
        name += ".weight" if name.endswith("position_embedding_table") else ""
        yield theirs(name.replace(".linear.", ".")), tensor
        return
    name = name.removeprefix("model.")
    if family == "mistral3":
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["vision_config"]["num_attention_heads"]
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        yield theirs(name), tensor
    elif family == "gemma3":
        if ".head." in name:
            return
        if "vision_model" not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        name = name.replace("_weight", ".weight")
        yield theirs(name), tensor + 1 if "soft_emb_norm" in name else tensor
    elif family == "llava":
        if name.startswith(_LLAVA_PROJECTOR):
            linear, end = name.removeprefix(_LLAVA_PROJECTOR).split(".")
            yield f"mm.{2 * int(linear) - 2}.{end}", tensor
            return
        if "vision_model" not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        layer = re.search(r"layers\.(\d+)", name)
        is_behind = layer is not None and int(layer[1]) >= _depth(config)
        if not (is_behind or "post_layernorm" in name or ".head." in name):
            yield theirs(name), tensor
    elif name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif family.startswith("qwen2") and ".qkv." in name:
        for part, third in zip("qkv", tensor.chunk(3), strict=True):
            yield theirs(name.replace("qkv", part)), third
    elif name.startswith("visual.deepstack_merger_list."):
        _, _, index, part, end = name.split(".")
        layer = config["vision_config"]["deepstack_visual_indexes"][int(index)]
        yield f"v.deepstack.{layer}.{part.replace('linear_', '')}.{end}", tensor
    elif family.startswith("qwen3") and name.startswith("visual.merger."):
        _, _, part, end = name.split(".")
        stem = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[part]
        yield f"{stem}.{end}", tensor
    else:
        yield theirs(name), tensor
