"""Computes what a model keeps of a sequence, by the text model's part of a config.json: keys and
values of each token, and one state in recurrent layers."""

from collections.abc import Mapping
from typing import Any

_RECURRENT = ("linear_attention", "conv", "mamba")
_WITHOUT_TOKENS = (*_RECURRENT, "mlp", "moe")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds of layers in Nemotron-H's ``hybrid_override_pattern``."""
_STATE_BYTES = 4
"""Of a number in the state of a recurrence; a convolution keeps inputs in the model's dtype."""


def kv_numbers(text: Mapping[str, Any]) -> int:
    """The numbers that a token takes in the KV cache.

    >>> kv_numbers({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64})
    256
    """
    layers = sum(kind not in _WITHOUT_TOKENS for kind in _kinds(text))
    if latent := text.get("kv_lora_rank"):
        return int(layers * (latent + (text.get("qk_rope_head_dim") or 0)))
    heads = text.get("num_attention_heads") or 1
    size = text.get("head_dim") or (text.get("hidden_size") or 1) // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * size)


def state_bytes(text: Mapping[str, Any], width: int) -> int:
    """Memory of a sequence's state over all recurrent layers; 0: there are none.

    Args:
        width: bytes of a number in the model's dtype.
    """
    kinds = _kinds(text)
    layers = sum(kind in _RECURRENT for kind in kinds)
    if text.get("model_type") == "falcon_h1":  # both in each layer
        layers = len(kinds)
    if not layers:
        return 0
    if taps := text.get("conv_L_cache"):
        return int(layers * (taps - 1) * text["hidden_size"] * width)
    matrix, channels = _sizes(text)
    taps = _first(text, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") or 4
    return layers * (matrix * _STATE_BYTES + (taps - 1) * channels * width)


def _sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of the matrices of one recurrent layer, and channels of its convolution."""
    if heads := text.get("linear_num_value_heads"):
        key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
        keys = text["linear_num_key_heads"] * key_dim
        return heads * key_dim * value_dim, 2 * keys + heads * value_dim
    heads = _first(text, "mamba_n_heads", "mamba_num_heads", "num_heads") or 128
    size = _first(text, "mamba_d_head", "mamba_head_dim", "head_dim")
    inner = (text.get("mamba_expand") or 2) * text["hidden_size"]
    if not isinstance(size, int):  # "auto", or not said
        size = inner // heads
    features = _first(text, "mamba_d_state", "ssm_state_size", "state_size") or 128
    groups = _first(text, "mamba_n_groups", "n_groups") or 1
    return heads * size * features, heads * size + 2 * groups * features


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; "attention" where nothing else is said."""
    if pattern := text.get("hybrid_override_pattern"):
        return [_LETTERS.get(letter, "attention") for letter in pattern]
    if kinds := text.get("layers_block_type") or text.get("layer_types"):
        return list(kinds)
    layers = range(text.get("num_hidden_layers") or 1)
    if interval := text.get("full_attention_interval"):
        return ["linear_attention" if (i + 1) % interval else "attention" for i in layers]
    if text.get("model_type") == "mamba2":
        return ["mamba" for _ in layers]
    attends = _first(text, "attn_layer_indices", "full_attn_idxs")
    if attends is None:
        return ["attention" for _ in layers]
    return ["attention" if i in attends else "mamba" for i in layers]


def _first(text: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is there."""
    return next((text[name] for name in names if text.get(name) is not None), None)
