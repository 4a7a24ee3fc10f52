"""Reads from a transformers config the values that layers and architectures share."""

from typing import Any


def head_dim(config: Any) -> int:
    """Features of one attention head: the config's ``head_dim``, else an equal part of the hidden
    size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: Any, layer_index: int) -> int | None:
    """The sliding window of a layer in tokens, or None. Where a config has ``layer_types``, only
    its ``sliding_attention`` layers have one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer_index] != "sliding_attention":
        return None
    return config.sliding_window if getattr(config, "use_sliding_window", True) else None
