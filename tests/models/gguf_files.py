"""Writes tiny checkpoints as GGUF files, with llama.cpp's names and layouts by the package
``gguf``."""

import contextlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.kernels.test_blockwise import random_blocks
from tests.models import gguf_hybrids

_ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    **gguf_hybrids.ARCHITECTURES,
}
_TOWERS = ("_vision.", "vision_tower.", "vision_model.", "visual.", "projector.", "connector.")
"""Parts of the names of tensors that are not in the file of the language model."""
_FURTHER = ("eh_proj.weight", "mtp.fc.weight")
"""Ends of the name that a layer has which predicts further tokens."""
_PERMUTED = ("llama", "mistral", "ministral3", "granite", "smollm3", "granitemoehybrid", "bamba")
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType
    | Callable[[str], gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.F32,
    part: tuple[int, int] = (0, 1),
    splits_latents: bool = True,
    **metadata: Any,
) -> Path:
    """Write a checkpoint of transformers as a GGUF file and return its path.

    Args:
        kind: of the matrices, or a function of a matrix's name in the checkpoint. Those that the
            package cannot quantize to get random blocks, with weights of about the same size.
        part: index and number of the files; each gets every second tensor, or third, ...
        splits_latents: as the converter of 2025 does; else as that before.
        metadata: further keys of the tokenizer, such as ``pre``.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    stored = load_file(checkpoint / "model.safetensors")
    if has_further := any(name.endswith(_FURTHER) for name in stored):
        layers = config["num_hidden_layers"]
        stored = {_further_name(name, layers): tensor for name, tensor in stored.items()}
        config["num_hidden_layers"] = layers + 1
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    if config["model_type"] in gguf_hybrids.KINDS:
        config = gguf_hybrids.add_config(writer, config)
    _add_config(writer, config)
    if has_further:
        writer.add_nextn_predict_layers(1)
    if "kv_lora_rank" in config:
        _add_latents(writer, config, splits_latents)
    _add_byte_level_tokenizer(writer, checkpoint, **metadata)
    if part[1] > 1:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    pieces = (
        piece
        for name, tensor in stored.items()
        for piece in _pieces(config, name, tensor)
        for piece in (_split(config, *piece) if splits_latents else [piece])
    )
    tensors = sorted(_stacked(dict(pieces)).items())
    for name, tensor in tensors[part[0] :: part[1]]:
        theirs = _own_name(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        values = _layout(config, name, tensor.float()).numpy()
        of = kind(name) if callable(kind) else kind
        is_small = name.endswith(("conv.weight", "conv1d.weight", "norm.weight"))
        is_matrix = values.ndim > 1 and name.endswith("weight") and not is_small
        of = of if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, _quantized(values, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_latents(writer: gguf.GGUFWriter, config: dict[str, Any], split: bool) -> None:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count", "leading_dense_block_count"):  # fmt: skip
        writer.kv_data[0].pop(f"deepseek2.{name}", None)
    if split:
        writer.kv_data[0].pop("deepseek2.attention.head_count_kv")
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + rope)
        writer.add_value_length(latent)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    else:
        writer.add_key_length(key)
        writer.add_value_length(value)
    writer.add_rope_dimension_count(rope)
    writer.add_kv_lora_rank(latent)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    is_v2 = config["model_type"] == "deepseek_v2"
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SOFTMAX if is_v2 else gating.SIGMOID)
    dense = config.get("first_k_dense_replace")
    if dense is None:
        dense = config["mlp_layer_types"].count("dense")
    writer.add_leading_dense_block_count(dense)
    if multiplier := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)


def _split(
    config: dict[str, Any], name: str, tensor: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """The projection of latents to keys and values in two, the first one transposed."""
    if "kv_b_proj" not in name:
        return [(name, tensor)]
    heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
    keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return [
        (name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2).contiguous()),
        (name.replace("kv_b_proj", "v_b_proj"), values.contiguous()),
    ]


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as llama.cpp's converter takes them: those of all experts in one, and each bias
    with a suffix."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if any(part in name for part in _TOWERS):
            continue
        name = name.removeprefix("language_model.")
        name = re.sub(r"^model\.(language|text)_model\.", "model.", name)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stacks.setdefault(re.sub(r"(\.experts)\.\d+\.", r"\1.", name), []).append(tensor)
    return {
        name: torch.stack(stack) if len(stack) > 1 else stack[0] for name, stack in stacks.items()
    }


def _further_name(name: str, layers: int) -> str:
    """Qwen's names of a layer that predicts further tokens, as others have them."""
    if not name.startswith("mtp."):
        return name
    parts = {
        "layers.0.": "",
        "fc.": "eh_proj.",
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "norm.": "shared_head.norm.",
    }
    rest = name.removeprefix("mtp.")
    part = next(part for part in parts if rest.startswith(part))
    return f"model.layers.{layers}.{parts[part]}{rest.removeprefix(part)}"


def _own_name(name: str) -> str | None:
    """The name of a tensor for which the package has none in all architectures; None: it has one."""
    if not name.startswith("model.layers."):
        return None
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    own = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "router.proj.weight": "ffn_gate_inp.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "eh_proj.weight": "nextn.eh_proj.weight",
        "enorm.weight": "nextn.enorm.weight",
        "hnorm.weight": "nextn.hnorm.weight",
        "embed_tokens.weight": "nextn.embed_tokens.weight",
        "shared_head.head.weight": "nextn.shared_head_head.weight",
        "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    }
    return f"blk.{layer}.{own[part]}" if part in own else None


def _quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    with contextlib.suppress(NotImplementedError):
        return gguf.quantize(values, kind)
    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    blocks = random_blocks(kind.name, rows, columns, largest=1.0)
    rms = float(gguf.dequantize(blocks.numpy(), kind).std())
    blocks = random_blocks(kind.name, rows, columns, largest=float(values.std()) / rms)
    return blocks.unflatten(0, values.shape[:-1]).numpy()


def _pieces(
    config: dict[str, Any], name: str, tensor: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that llama.cpp's converter makes of one."""
    if config["model_type"] in gguf_hybrids.KINDS:
        return gguf_hybrids.pieces(config, name, tensor)
    if config["model_type"] != "gpt_oss":
        return [(name, tensor)]
    name += ".weight" if name.endswith(".sinks") else ""
    path, is_experts, last = name.partition(".mlp.experts.")
    if not is_experts:
        return [(name, tensor)]
    projection = last.removesuffix("_bias")
    end = "bias" if last.endswith("_bias") else "weight"
    tensor = tensor if end == "bias" else tensor.transpose(1, 2)
    names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
    return [
        (f"{path}.mlp.experts.{each}.{end}", tensor[:, first :: len(names)].contiguous())
        for first, each in enumerate(names)
    ]


def _layout(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as llama.cpp's converter stores it."""
    if config["model_type"] in _PERMUTED:
        for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f"{part}." in name:
                heads = config[count]
                heads = max(heads) if isinstance(heads, list) else heads
                halves = tensor.unflatten(0, (heads, 2, -1))
                return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
    if config["model_type"] in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


_KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
"""Settings of a checkpoint, and the writer's methods for them."""


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, add in _KEYS.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{add}")(config[key])
    if config["model_type"] in ("minimax_m2", "gpt_oss"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    rope = config["rope_parameters"]
    if config["model_type"].startswith("gemma4"):
        _add_gemma4(writer, config)
        return
    if config["model_type"] in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])
    elif "full_attention" in rope:
        writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if rope["rope_type"] == "default":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    _add_rope_scaling(writer, config, rope, rotated)


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes by layer, and the rotated frequencies as divisors of 1 and of 1e30."""
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = [config["per_layer_config"].get(str(index), {}) for index in range(len(kinds))]
    full = own[kinds.index(False)]
    local, heads = config["head_dim"], config["num_key_value_heads"]
    shared, size = config["num_kv_shared_layers"], config["intermediate_size"]
    twice = [config["use_double_wide_mlp"] and i >= len(kinds) - shared for i in range(len(kinds))]
    writer.add_sliding_window_pattern(kinds)
    writer.add_shared_kv_layers(shared)
    for key, value in (
        ("key_length", full["head_dim"]),
        ("value_length", full["head_dim"]),
        ("key_length_swa", local),
        ("value_length_swa", local),
        ("head_count_kv", [one.get("num_key_value_heads", heads) for one in own]),
        ("feed_forward_length", [size * (1 + double) for double in twice]),
        ("embedding_length_per_layer_input", config.get("hidden_size_per_layer_input", 0)),
        ("rope_freq_base", config["rope_parameters"]["full_attention"]["rope_theta"]),
        ("rope_freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        ("rope_dimension_count", full["head_dim"]),
    ):
        writer.kv_data[0].pop(f"gemma4.attention.{key}", None)
        writer.kv_data[0].pop(f"gemma4.{key}", None)
        getattr(writer, f"add_{key}")(value)
    factor = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(full["head_dim"] * factor / 2)
    divisors = [1.0] * rotated + [1e30] * (full["head_dim"] // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _add_rope_scaling(
    writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], rotated: int
) -> None:
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for key, add in (
                ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
                ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                ("mscale_all_dim", writer.add_rope_scaling_yarn_log_mul),
            ):
                if key in rope:
                    add(rope[key])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, rotated))
    elif kind == "longrope":
        longest, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]  # fmt: skip
        stretch = longest / original
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(scale)
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _llama3_factors(rope: dict[str, Any], rotated: int) -> np.ndarray:
    """The divisor of each frequency, by the paper's formula, as llama.cpp's converter stores it."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for i in range(0, rotated, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / rotated)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _add_byte_level_tokenizer(writer: gguf.GGUFWriter, folder: Path, **metadata: Any) -> None:
    """Add the tables of a byte-level tokenizer, and its chat template."""
    tables = json.loads((folder / "tokenizer.json").read_text())
    _add_tokens(writer, "gpt2", folder, pre=metadata.pop("pre", "gpt-2"), **metadata)
    writer.add_token_merges([" ".join(merge) for merge in tables["model"]["merges"]])
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def write_sentencepiece(folder: Path, path: Path, **metadata: Any) -> Path:
    """Write a file without tensors: the tables of a SentencePiece-like tokenizer, scores falling
    with the ids."""
    writer = gguf.GGUFWriter(path, "llama")
    count = _add_tokens(writer, "llama", folder, **metadata)
    writer.add_token_scores([-float(i) for i in range(count)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokens(writer: gguf.GGUFWriter, model: str, folder: Path, **metadata: Any) -> int:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) or f"[PAD{i}]" for i in range(tokenizer.get_vocab_size())]
    kinds = [
        (_CONTROL if added[i].special else _USER_DEFINED)
        if i in added
        else _BYTE
        if model == "llama" and token.startswith("<0x")
        else _NORMAL
        for i, token in enumerate(tokens)
    ]
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    ids = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk")}
    for name, token in ids.items():
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(tokenizer.token_to_id(token))
    if "pre" in metadata:
        writer.add_tokenizer_pre(metadata.pop("pre"))
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    return len(tokens)
