"""The config.json of models with recurrent layers, by the metadata of their GGUF files."""

from collections.abc import Callable
from typing import Any

from radixrt.models.gguf.file import Metadata


def _largest(value: Any) -> int:
    """A size that only some layers have, and the others as 0."""
    return int(max(value)) if isinstance(value, list) else int(value)


def _kinds(meta: Metadata, part: str, kind: str = "linear_attention") -> list[str]:
    """The kind of each layer: ``kind`` where it has this tensor."""
    return [kind if has else "full_attention" for has in meta.in_layers(part)]


def _lfm2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    found = {
        "layer_types": _kinds(meta, "shortconv.conv.weight", "conv"),
        "num_key_value_heads": _largest(config["num_key_value_heads"]),
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": meta.need("shortconv.l_cache"),
        "conv_bias": any(meta.in_layers("shortconv.in_proj.bias")),
        "block_auto_adjust_ff_dim": False,
    }
    if not meta.get("expert_count"):
        return found
    return {
        **found,
        "num_dense_layers": meta.get("leading_dense_block_count", 0),
        "num_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "use_expert_bias": any(meta.in_layers("exp_probs_b.bias")),
        "norm_topk_prob": True,
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
    }


def _qwen3_next(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The converter brings the value heads of Qwen3.5 into another order than its checkpoints
    have; Qwen3.5's layers that predict further tokens are the last of the file, and none of
    the model."""
    heads = meta.need("ssm.time_step_rank")
    layers = config["num_hidden_layers"] - meta.get("nextn_predict_layers", 0)
    found = {
        "num_hidden_layers": layers,
        "layer_types": _kinds(meta, "ssm_a")[:layers],
        "linear_num_key_heads": meta.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta.need("ssm.state_size"),
        "linear_value_head_dim": meta.need("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": meta.need("ssm.conv_kernel"),
        "linear_value_heads_tiled": meta.architecture != "qwen3next",
    }
    if not meta.get("expert_count"):
        return found
    dense = [i for i, has in enumerate(meta.in_layers("ffn_gate.weight")) if has]
    return {
        **found,
        "num_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.need("expert_shared_feed_forward_length"),
        **({"mlp_only_layers": dense} if meta.architecture == "qwen3next" else {}),
    }


def _bamba_sizes(meta: Metadata) -> dict[str, Any]:
    heads = meta.need("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": meta.need("ssm.inner_size") // heads,
        "mamba_n_groups": meta.need("ssm.group_count"),
        "mamba_d_state": meta.need("ssm.state_size"),
        "mamba_d_conv": meta.need("ssm.conv_kernel"),
        "mamba_conv_bias": any(meta.in_layers("ssm_conv1d.bias")),
        "mamba_proj_bias": any(meta.in_layers("ssm_in.bias")),
    }


def _granite_hybrid(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Bamba has this name too: Granite with other factors and a rotary embedding."""
    experts = meta.get("expert_count", 0)
    up = meta.file.tensors.get("blk.0.ffn_up.weight")
    size = _largest(config["intermediate_size"])
    shared = meta.get("expert_shared_feed_forward_length") or (up.shape[0] if up else size)
    return {
        **_bamba_sizes(meta),
        "mamba_expand": meta.need("ssm.inner_size") // config["hidden_size"],
        "layer_types": _kinds(meta, "ssm_a"),
        "num_key_value_heads": _largest(config["num_key_value_heads"]),
        "intermediate_size": size,
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": meta.get("expert_used_count", 0),
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned") else None,
        "attention_bias": any(meta.in_layers("attn_q.bias")),
        "embedding_multiplier": meta.get("embedding_scale", 1.0),
        "attention_multiplier": meta.get("attention.scale") or config["head_dim"] ** -0.5,
        "residual_multiplier": meta.get("residual_scale", 1.0),
        "logits_scaling": meta.get("logit_scale", 1.0),
    }


def _falcon_h1(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The converter multiplies the weights by the constants."""
    has_norm = meta.has("blk.0.ssm_norm.weight")
    return {
        **_bamba_sizes(meta),
        "mamba_d_ssm": meta.need("ssm.inner_size"),
        "mamba_rms_norm": has_norm,
        "mamba_norm_before_gate": False,
        "has_multiplied_weights": True,
        "projectors_bias": meta.has("blk.0.ssm_out.bias"),
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        "mlp_bias": meta.has("blk.0.ffn_up.bias"),
    }


def _nemotron_h(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    parts = ("ssm_in.weight", "attn_q.weight", "ffn_up.weight")
    kinds = ("linear_attention", "full_attention", "mlp")
    has = zip(*map(meta.in_layers, parts), strict=True)
    heads = meta.need("ssm.time_step_rank")
    types = [next((k for k, h in zip(kinds, one, strict=True) if h), "moe") for one in has]
    ups = [meta.file.tensors[f"blk.{i}.ffn_up.weight"] for i, k in enumerate(types) if k == "mlp"]
    return {
        "layers_block_type": types,
        "num_key_value_heads": _largest(config["num_key_value_heads"]),
        "intermediate_size": ups[0].shape[0] if ups else _largest(config["intermediate_size"]),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.need("ssm.inner_size") // heads,
        "n_groups": meta.need("ssm.group_count"),
        "ssm_state_size": meta.need("ssm.state_size"),
        "conv_kernel": meta.need("ssm.conv_kernel"),
        "use_conv_bias": any(meta.in_layers("ssm_conv1d.bias")),
        "use_bias": any(meta.in_layers("ssm_in.bias")),
        "attention_bias": any(meta.in_layers("attn_q.bias")),
        "mlp_bias": any(meta.in_layers("ffn_up.bias")),
        "n_routed_experts": meta.get("expert_count", 0),
        "num_experts_per_tok": meta.get("expert_used_count", 0),
        "moe_intermediate_size": meta.get("expert_feed_forward_length", 0),
        "moe_shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": meta.get("expert_weights_norm", True),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "n_group": meta.get("expert_group_count", 1),
        "topk_group": meta.get("expert_group_used_count", 1),
    }


def _mamba2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    heads = meta.need("ssm.time_step_rank")
    return {
        "num_heads": heads,
        "head_dim": meta.need("ssm.inner_size") // heads,
        "n_groups": meta.need("ssm.group_count"),
        "state_size": meta.need("ssm.state_size"),
        "conv_kernel": meta.need("ssm.conv_kernel"),
        "expand": meta.need("ssm.inner_size") // config["hidden_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_conv_bias": any(meta.in_layers("ssm_conv1d.bias")),
        "use_bias": any(meta.in_layers("ssm_in.bias")),
    } | dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), None)


MIXTURES = {"lfm2moe", "qwen3next", "qwen35moe", "granitehybrid", "nemotron_h_moe"}
"""Architectures with experts."""

FAMILIES: dict[str, tuple[Callable[[Metadata, dict[str, Any]], dict[str, Any]], str, str]] = {
    "lfm2": (_lfm2, "Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": (_lfm2, "Lfm2MoeForCausalLM", "lfm2_moe"),
    "qwen3next": (_qwen3_next, "Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": (_qwen3_next, "Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": (_qwen3_next, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "granitehybrid": (_granite_hybrid, "GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "falcon-h1": (_falcon_h1, "FalconH1ForCausalLM", "falcon_h1"),
    "nemotron_h": (_nemotron_h, "NemotronHForCausalLM", "nemotron_h"),
    "nemotron_h_moe": (_nemotron_h, "NemotronHForCausalLM", "nemotron_h"),
    "mamba2": (_mamba2, "Mamba2ForCausalLM", "mamba2"),
}
"""As in ``radixrt.models.gguf.config``."""
