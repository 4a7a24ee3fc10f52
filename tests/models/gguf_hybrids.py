"""The parts of GGUF files that only models with recurrent layers have, as llama.cpp's converter
writes them."""

from collections.abc import Callable
from typing import Any

import gguf
import torch

ARCHITECTURES = {
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
}
KINDS = {"lfm2", "mamba2", *ARCHITECTURES}
"""Model types with recurrent layers."""


def pieces(config: dict[str, Any], name: str, tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """The tensors that the converter makes of one, under names for which the package has another."""
    kind = config["model_type"]
    if "visual." in name:
        return []
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if kind.startswith("qwen3") and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if kind.startswith("qwen3_5") and ".linear_attn." in name:
        tensor = _tiled(config, name, tensor)
    if name.endswith(("A_log", "mixer.D", "mamba.D")) and not kind.startswith("qwen3"):
        tensor = tensor[:, None]
    if ".mamba.norm." in name or ".mixer.norm." in name:
        groups = config.get("mamba_n_groups") or config["n_groups"]
        tensor = tensor.unflatten(0, (groups, -1))
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    if ".conv.conv.weight" in name or "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    if ".feed_forward.experts." in name:
        name = name.removeprefix("model.")
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    if ".in_proj_qkvz." in name:
        return _split_qkvz(config, name, tensor)
    for merged, path in (
        ("shared_mlp.input_linear", "shared_mlp"),
        ("block_sparse_moe.input_linear", "experts"),
    ):
        if merged in name:
            gate, up = tensor.chunk(2, dim=-2)
            has_experts = bool(config["num_local_experts"])
            path = (
                "mlp.experts"
                if path == "experts"
                else "mlp.shared_expert"
                if has_experts
                else "mlp"
            )
            layer = name.partition(merged)[0]
            return [(f"{layer}{path}.{p}_proj.weight", t) for p, t in (("gate", gate), ("up", up))]
    if kind == "granitemoehybrid" and not config["num_local_experts"]:
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    if kind == "falcon_h1":
        tensor = _multiplied(config, name, tensor)
    return [(name, tensor)]


def _tiled(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Heads of values with a distance of the number of keys between those of one key."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = torch.arange(heads).view(keys, -1).T.flatten()

    def reordered(values: torch.Tensor, dim: int) -> torch.Tensor:
        return values.unflatten(dim, (heads, -1)).index_select(dim, order).flatten(dim, dim + 1)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        first = 2 * keys * config["linear_key_head_dim"]
        return torch.cat([tensor[:first], reordered(tensor[first:], 0)])
    if ".out_proj." in name:
        return reordered(tensor, 1)
    return tensor if ".norm." in name else reordered(tensor, 0)


def _split_qkvz(config: dict[str, Any], name: str, tensor: torch.Tensor) -> list[tuple[str, Any]]:
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = tensor.unflatten(0, (keys, -1)).split([size, size, values, values], dim=1)
    query, key, value, gate = (part.flatten(0, 1) for part in parts)
    merged = torch.cat([query, key, value])
    both = (("qkv", merged), ("z", gate))
    return [(name.replace("in_proj_qkvz", f"in_proj_{part}"), rows) for part, rows in both]


def _multiplied(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Falcon-H1's constants are in its weights."""
    attention = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["factor_of_embeddings"],
    }
    part = name.split(".")[-2]
    if part != "in_proj":
        return tensor * factors.get(part, 1.0)
    size, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    counts = torch.tensor([size, size, keys, keys, config["mamba_n_heads"]])
    rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(counts)
    return tensor * rows[:, None] * config["ssm_in_multiplier"]


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add the settings of recurrent layers. Returns the config with the others as ``gguf_files``
    reads them."""
    kind = config["model_type"]
    get: Callable[..., Any] = config.get
    types = get("layers_block_type") or get("layer_types") or []
    if kind == "bamba":
        attends = get("attn_layer_indices")
        types = ["full_attention" if i in attends else "" for i in range(get("num_hidden_layers"))]
        writer.add_rope_scaling_finetuned(True)
    if kind == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(get("position_embedding_type") == "rope")
        writer.add_expert_shared_feed_forward_length(get("shared_intermediate_size"))
    if kind.startswith("lfm2"):
        writer.add_shortconv_l_cache(get("conv_L_cache"))
    elif kind.startswith("qwen3"):
        heads = get("linear_num_value_heads")
        _add_ssm(writer, get("linear_conv_kernel_dim"), get("linear_key_head_dim"), get("linear_num_key_heads"), heads, heads * get("linear_value_head_dim"))  # fmt: skip
        if get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(get("shared_expert_intermediate_size"))
    elif kind == "nemotron_h":
        heads = get("mamba_num_heads")
        _add_ssm(writer, get("conv_kernel"), get("ssm_state_size"), get("n_groups"), heads, heads * get("mamba_head_dim"))  # fmt: skip
        size = get("moe_shared_expert_intermediate_size")
        writer.add_expert_shared_feed_forward_length(size)
    elif kind == "mamba2":
        heads = get("num_heads")
        _add_ssm(writer, get("conv_kernel"), get("state_size"), get("n_groups"), heads, heads * get("head_dim"))  # fmt: skip
    else:
        heads = get("mamba_n_heads")
        _add_ssm(writer, get("mamba_d_conv"), get("mamba_d_state"), get("mamba_n_groups"), heads, heads * get("mamba_d_head"))  # fmt: skip
    kv_heads = get("num_key_value_heads", 0)
    if kind not in ("falcon_h1", "mamba2") and not kind.startswith("qwen3"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in types]
    size = config.get("intermediate_size", 0)
    if kind == "lfm2":
        multiple = config["block_multiple_of"]
        size = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return {
        "num_attention_heads": 0,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": get("norm_eps") or get("layer_norm_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_hidden_layers": len(types),
        **{key: value for key, value in config.items() if value is not None},
        "head_dim": get("head_dim") or config["hidden_size"] // get("num_attention_heads", 1),
        "num_key_value_heads": kv_heads,
        "intermediate_size": size,
        "first_k_dense_replace": get("num_dense_layers"),
        **(
            {"embedding_multiplier": None, "factor_of_embeddings": get("embedding_multiplier")}
            if kind == "falcon_h1"
            else {}
        ),
    }


def _add_ssm(
    writer: gguf.GGUFWriter, taps: int, keys: int, groups: int, heads: int, inner: int
) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(keys)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)
