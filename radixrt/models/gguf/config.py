"""Writes a GGUF file's metadata as the config.json and generation_config.json that the models
read."""

from collections.abc import Callable
from functools import partial
from typing import Any

from radixrt.base.errors import ConfigError
from radixrt.models.gguf import hybrids
from radixrt.models.gguf.file import GGUFFile, Metadata
from radixrt.models.refusals import not_yet

_ENDS_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<turn|>", "<|tool_response>"}  # fmt: skip
"""Tokens that end an answer, also where the metadata name only one of them; llama.cpp finds them by
name too."""
_HARMONY_ENDS = {"<|return|>", "<|call|>", "<|endoftext|>"}
"""Ends in vocabularies that have all of them (gpt-oss): there ``<|end|>`` ends a message, and
others follow."""
_CONTROL, _USER_DEFINED = 3, 4
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that make a router's scores."""


_POOLING_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
"""llama.cpp's numbers, and sentence-transformers' names."""


def transformers_config(
    file: GGUFFile, rope_factors: Callable[[str], list[float]]
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        rope_factors: reads a tensor of rotary factors by its name.

    Raises:
        ConfigError: an architecture that is not served, or metadata are missing.
    """
    meta = Metadata(file)
    has_experts = bool(meta.get("expert_count", 0))
    if meta.architecture not in FAMILIES or (has_experts and meta.architecture not in _MIXTURES):
        name = meta.architecture + (" with experts" if has_experts else "")
        raise ConfigError(f"{file.files[0]} cannot be served. {not_yet(name)}")
    heads = meta.need("attention.head_count")
    hidden = meta.need("embedding_length")
    specific, architecture, model_type = FAMILIES[meta.architecture]
    head_dim = meta.get("attention.key_length") or hidden // max(heads, 1)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _dtype(file),
        "vocab_size": file.tensors["token_embd.weight"].shape[0]
        if meta.has("token_embd.weight")
        else meta.need("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": meta.need("feed_forward_length"),
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not meta.has("output.weight"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file),
        "pad_token_id": None,
        "rope_parameters": _rope(meta, head_dim, rope_factors),
    }
    return config | specific(meta, config)


def pooling_files(file: GGUFFile) -> dict[str, Any]:
    """The files of sentence-transformers, by their names, that say how an embedding model pools; of
    another model none."""
    mode = _POOLING_MODES.get(Metadata(file).get("pooling_type"))
    if mode is None:
        return {}
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    return {
        "modules.json": [{"path": path, "type": kind} for path, kind in parts],
        "1_Pooling/config.json": {"pooling_mode": mode},
    }


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of generation_config.json: end tokens, and the sampling defaults of newer
    files."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    found = {
        ours: file.metadata[f"general.sampling.{theirs}"]
        for theirs, ours in names.items()
        if f"general.sampling.{theirs}" in file.metadata
    }
    return {**found, "eos_token_id": _end_ids(file)}


def _end_ids(file: GGUFFile) -> list[int]:
    tokenizer = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    named = (tokenizer.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    kinds = zip(tokenizer.get("tokens", ()), tokenizer.get("token_type", ()), strict=False)
    added = (_CONTROL, _USER_DEFINED)
    known = {t: i for i, (t, kind) in enumerate(kinds) if kind in added}
    if known.keys() >= _HARMONY_ENDS:
        return sorted(known[end] for end in _HARMONY_ENDS)
    found = {i for token, i in known.items() if token in _ENDS_OF_TURN}
    return sorted(found | {i for i in named if i is not None})


def _dtype(file: GGUFFile) -> str:
    """float32 and float16 where all matrices have it, else bfloat16: also for quantized ones."""
    kinds = {entry.kind for entry in file.tensors.values() if len(entry.shape) > 1}
    return "float32" if kinds == {0} else "float16" if kinds == {1} else "bfloat16"


_YARN = {
    "attention_factor": "attn_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "log_multiplier",
    "mscale_all_dim": "log_multiplier",
}
"""Parameters of YaRN as transformers and llama.cpp call them. The two scales are equal in all files
that have one."""


def _rope(
    meta: Metadata, head_dim: int, rope_factors: Callable[[str], list[float]]
) -> dict[str, Any]:
    rotated = meta.get("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": meta.get("rope.freq_base", 10000.0),
    }
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    original = meta.get("rope.scaling.original_context_length") or meta.need("context_length")
    names = [f"rope_factors_{length}.weight" for length in ("short", "long")]
    if meta.has("rope_freqs.weight"):  # Llama 3's stretch, worked out by the converter
        names = ["rope_freqs.weight"] * 2
    if all(map(meta.has, names)):
        short, long = map(rope_factors, names)
        return rope | {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": meta.get("rope.scaling.attn_factor", 1.0),
        }
    scaling = meta.get("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": meta.need("rope.scaling.factor")}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = original
            named = {name: meta.get(f"rope.scaling.yarn_{key}") for name, key in _YARN.items()}
            rope |= {name: value for name, value in named.items() if value is not None}
    elif scaling != "none":
        raise ConfigError(f"The rope scaling {scaling!r} is not supported in GGUF files.")
    return rope


def _biases(**parts: str) -> Callable[[Metadata, dict[str, Any]], dict[str, bool]]:
    """Sets each field by whether the first layer's part has a bias."""
    return lambda meta, _: {f: meta.has(f"blk.0.{part}.bias") for f, part in parts.items()}


_llama = _biases(attention_bias="attn_q", mlp_bias="ffn_up")


def _qwen(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": meta.has("blk.0.attn_q.bias"), "use_sliding_window": False}


def _phi3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        "sliding_window": meta.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
    }


def _gemma(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # The scale of the scores is not in the metadata: the 27B models, known by their layers, have
    # another one.
    largest = layers == {"gemma2": 46, "gemma3": 62}[meta.architecture]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    period = 2 if meta.architecture == "gemma2" else 6
    period = meta.get("attention.sliding_window_pattern") or period
    full = [(i + 1) % period == 0 for i in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if largest else head_dim,
        "sliding_window": meta.need("attention.sliding_window"),
        "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _gemma3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", 10000.0)}
    rope = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**_gemma(meta, config), "rope_parameters": rope}


def _gemma4(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes that differ by layer are lists; the plain ones of heads are those of layers without a
    window."""
    layers = config["num_hidden_layers"]
    has_window = meta.need("attention.sliding_window_pattern")
    full = has_window.index(False)
    kv_heads, widths = (
        value if isinstance(value, list) else [value] * layers
        for value in (config["num_key_value_heads"], config["intermediate_size"])
    )
    rope = config["rope_parameters"]
    rotated = rope["short_factor"].count(1.0) / len(rope["short_factor"])
    theta = meta.need("rope.freq_base")
    table = meta.file.tensors.get("per_layer_token_embd.weight")
    return {
        "pad_token_id": meta.file.metadata.get("tokenizer.ggml.padding_token_id", 0),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [f"{'sliding' if w else 'full'}_attention" for w in has_window],
        "sliding_window": meta.need("attention.sliding_window"),
        "head_dim": meta.need("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": kv_heads[has_window.index(True)],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": not meta.has(f"blk.{full}.attn_v.weight"),
        "num_kv_shared_layers": meta.get("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[0] != widths[-1],
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else config["vocab_size"],
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "enable_moe_block": bool(meta.get("expert_count", 0)),
        "num_experts": meta.get("expert_count"),
        "top_k_experts": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": rotated},
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", 10000.0)},
        },
    }  # fmt: skip


def _smollm3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers do not rotate is not in the metadata: every fourth."""
    rotates = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    return {**_llama(meta, config), "no_rope_layers": rotates}


def _windows(meta: Metadata, config: dict[str, Any], period: int) -> dict[str, Any]:
    """The window and the layers that have it: the metadata list them, or all but the last of each
    period have it."""
    window, layers = meta.get("attention.sliding_window") or None, config["num_hidden_layers"]
    slides = meta.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        slides = [(i + 1) % (slides or period) != 0 for i in range(layers)]
    kinds = ["sliding_attention" if window and each else "full_attention" for each in slides]
    return {"sliding_window": window, "layer_types": kinds}


def _olmo2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 has windows; the frequencies of layers without are stretched alone."""
    found = {"attention_bias": meta.has("blk.0.attn_q.bias")}
    if not meta.get("attention.sliding_window"):
        return found
    rope = config["rope_parameters"]
    base = meta.get("rope.freq_base_swa") or rope["rope_theta"]
    local = {"rope_type": "default", "rope_theta": base}
    return {
        **found,
        **_windows(meta, config, 4),
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _granite(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    scale = config["head_dim"] ** -0.5
    return {
        **_llama(meta, config),
        "embedding_multiplier": meta.get("embedding_scale", 1.0),
        "attention_multiplier": meta.get("attention.scale", scale),
        "residual_multiplier": meta.get("residual_scale", 1.0),
        "logits_scaling": meta.get("logit_scale", 1.0),
    }


def _ministral3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Mistral Small 3.1 has this name too, but queries that do not grow."""
    beta = meta.get("attention.temperature_scale")
    if beta is None:
        kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return {**kind, "sliding_window": None}
    original = meta.get("rope.scaling.original_context_length") or meta.need("context_length")
    rope = {"original_max_position_embeddings": original, **config["rope_parameters"]}
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


def _glm4_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Layers that predict further tokens are the last of the file, and none of the model."""
    return {
        "num_hidden_layers": config["num_hidden_layers"] - meta.get("nextn_predict_layers", 0),
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        "use_qk_norm": meta.has("blk.0.attn_q_norm.weight"),
        "n_routed_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "n_shared_experts": meta.need("expert_shared_count"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", True),
        "n_group": meta.get("expert_group_count", 1),
        "topk_group": meta.get("expert_group_used_count", 1),
    }


def _deepseek2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek V2 and V3, Moonlight and GLM-4.7-Flash, told apart by the router. In newer
    files the sizes of keys and values are those of the latent; their own have other names."""
    rotated = meta.need("rope.dimension_count")
    key = meta.get("attention.key_length_mla") or meta.need("attention.key_length")
    is_v3 = meta.get("expert_gating_func", _SOFTMAX) == _SIGMOID
    rope = dict(config["rope_parameters"])
    rope.pop("partial_rotary_factor", None)
    for name in ("mscale", "mscale_all_dim"):
        if name in rope:  # the converter writes a tenth of it
            rope[name] *= 10
    groups = meta.get("expert_group_count") or 1
    return {
        **_glm4_moe(meta, config),
        "architectures": [f"DeepseekV{3 if is_v3 else 2}ForCausalLM"],
        "model_type": f"deepseek_v{3 if is_v3 else 2}",
        "attention_bias": False,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "kv_lora_rank": meta.need("attention.kv_lora_rank"),
        "q_lora_rank": meta.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": meta.get("attention.value_length_mla") or meta.need("attention.value_length"),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": meta.get("expert_group_used_count") or 1,
        "rope_parameters": rope,
    }


def _minimax_m2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": meta.need("expert_feed_forward_length"),
        "num_local_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
    }


def _gpt_oss(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_minimax_m2(meta, config),
        **_windows(meta, config, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _qwen3_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_qwen(meta, config),
        "num_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


_MIXTURES = {
    "gemma4",
    "qwen3moe",
    "qwen3vlmoe",
    "glm4moe",
    "deepseek2",
    "minimax-m2",
    "gpt-oss",
    *hybrids.MIXTURES,
}
"""Architectures with experts; some models of Gemma 4 and Granite 4 have none."""
FAMILIES: dict[str, tuple[Callable[[Metadata, dict[str, Any]], dict[str, Any]], str, str]] = {
    "llama": (_llama, "LlamaForCausalLM", "llama"),
    "qwen2": (_qwen, "Qwen2ForCausalLM", "qwen2"),
    "qwen3": (_qwen, "Qwen3ForCausalLM", "qwen3"),
    "qwen2vl": (_qwen, "Qwen2ForCausalLM", "qwen2"),
    "qwen3vl": (_qwen, "Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": (_qwen3_moe, "Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": (_gemma, "Gemma2ForCausalLM", "gemma2"),
    "gemma3": (_gemma3, "Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": (_gemma4, "Gemma4ForCausalLM", "gemma4_text"),
    "phi3": (_phi3, "Phi3ForCausalLM", "phi3"),
    "smollm3": (_smollm3, "SmolLM3ForCausalLM", "smollm3"),
    "olmo2": (_olmo2, "Olmo2ForCausalLM", "olmo2"),
    "granite": (_granite, "GraniteForCausalLM", "granite"),
    "seed_oss": (
        _biases(attention_bias="attn_q", attention_out_bias="attn_output"),
        "SeedOssForCausalLM",
        "seed_oss",
    ),
    "ernie4_5": (_biases(use_bias="attn_q"), "Ernie4_5ForCausalLM", "ernie4_5"),
    "exaone4": (partial(_windows, period=4), "Exaone4ForCausalLM", "exaone4"),
    "hunyuan-dense": (_llama, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "mistral3": (_ministral3, "Ministral3ForCausalLM", "ministral3"),
    "qwen3moe": (_qwen3_moe, "Qwen3MoeForCausalLM", "qwen3_moe"),
    "glm4moe": (_glm4_moe, "Glm4MoeForCausalLM", "glm4_moe"),
    "deepseek2": (_deepseek2, "DeepseekV3ForCausalLM", "deepseek_v3"),
    "minimax-m2": (_minimax_m2, "MiniMaxM2ForCausalLM", "minimax_m2"),
    "gpt-oss": (_gpt_oss, "GptOssForCausalLM", "gpt_oss"),
    **hybrids.FAMILIES,
}
"""llama.cpp's name of an architecture: its own settings, the class in config.json, and
transformers' model type."""

_FURTHER_TYPES = {
    "llama": {"mistral", "mixtral"},
    "olmo2": {"olmo3"},
    "deepseek2": {"deepseek_v2", "glm4_moe_lite"},
    "mistral3": {"mistral"},
    "granitehybrid": {"bamba"},
    "qwen2vl": {"qwen2_vl", "qwen2_5_vl"},
    "qwen3vl": {"qwen3_vl"},
    "qwen3vlmoe": {"qwen3_vl_moe"},
}
"""Model types that llama.cpp's architectures have beside that of ``FAMILIES``."""


def is_of_type(architecture: str, model_type: str) -> bool:
    """Whether llama.cpp has models of a model type of transformers under this architecture."""
    known, of_text = FAMILIES.get(architecture), model_type.removesuffix("_text")
    return (known is not None and known[2].removesuffix("_text") == of_text) or (
        of_text in _FURTHER_TYPES.get(architecture, ())
    )
