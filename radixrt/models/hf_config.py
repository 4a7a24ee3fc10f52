"""Readings of a transformers config that several architectures share."""

from typing import Any


def head_dim(config: Any) -> int:
    """Features of one attention head: the config's own word, else an equal part of the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_windows(config: Any) -> list[int | None]:
    """Each layer's sliding window, of a config whose ``layer_types`` say which layers have one."""
    window = config.sliding_window if getattr(config, "use_sliding_window", True) else None
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]
