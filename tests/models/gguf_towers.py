"""Writes the towers of tiny checkpoints as ``mmproj-*.gguf``, with the metadata, the names and the
layouts of llama.cpp's converter (its folder ``conversion``) by the package ``gguf``."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from torch import Tensor

Kind = gguf.GGMLQuantizationType
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
) -> Path:
    """Write the tower of a checkpoint and return its path.

    Args:
        kind: of the matrices, or a function of a matrix's name in the file.
        swapped: name the projections of MLPs as files of before 2025 do.
        rounded: store what the package dequantizes, in float32.
        projection_dim: of a tower for another model.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    vision, family = config["vision_config"], config["model_type"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(_PROJECTORS[family])
    writer.add_vision_projection_dim(projection_dim or config["text_config"]["hidden_size"])
    _add_sizes(writer, config)
    files = ("preprocessor_config.json", "processor_config.json")
    found = [json.loads(file.read_text()) for file in map(checkpoint.joinpath, files) if file.is_file()]  # fmt: skip
    settings = {name: value for one in found for name, value in (one | one.get("image_processor", {})).items()}  # fmt: skip
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    _ADD[family](writer, config, settings)
    depth = vision.get("num_hidden_layers") or vision["depth"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        for theirs, part in _parts(family, config, name, tensor.float(), names):
            if swapped:
                theirs = re.sub("ffn_(up|down)", _swap, theirs)
            values = part.contiguous().numpy()
            of = kind(theirs) if callable(kind) else kind
            if values.ndim < 2 or "position_embd" in theirs or values.shape[-1] % 32:
                of = of if of == Kind.F16 and values.ndim > 1 else Kind.F32
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
    writer.add_vision_block_count(vision.get("num_hidden_layers") or vision["depth"])
    writer.add_vision_head_count(vision.get("num_attention_heads") or vision["num_heads"])
    eps = text["rms_norm_eps"] if is_qwen else vision.get("layer_norm_eps", 1e-5)
    writer.add_vision_attention_layernorm_eps(eps)


def _add_gemma3(writer: gguf.GGUFWriter, config: Any, settings: Any) -> None:
    writer.add_vision_use_gelu(True)
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    writer.add_vision_projector_scale_factor(side // int(settings["image_seq_length"] ** 0.5))


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
    if not any(part in name for part in ("vision_tower", "visual.", "vision_model", "multi_modal_projector", "connector")):  # fmt: skip
        return

    def theirs(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        return found

    if family == "smolvlm":
        yield theirs(name), tensor
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
