"""Rotary position embedding (Su et al., 2021) and the ways checkpoints stretch it to longer contexts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from radixrt.errors import ConfigError
from radixrt.layers.kernels import LayerKernels
from radixrt.layers.torch_kernels import TorchKernels


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What decides a rotary embedding, taken from a checkpoint's config."""

    head_dim: int
    parameters: Mapping[str, Any]
    """``rope_type``, ``rope_theta`` and what the type needs, named as in transformers."""
    max_position_embeddings: int
    context_length: int
    """Positions the table covers: what is served, at most what the checkpoint allows."""

    @property
    def rotary_dim(self) -> int:
        """How many features of a head are rotated; the rest pass unchanged."""
        return int(self.head_dim * (self.parameters.get("partial_rotary_factor") or 1.0))

    @property
    def original_length(self) -> int:
        """The context the model was trained for before it was stretched."""
        return self.parameters.get("original_max_position_embeddings") or (
            self.max_position_embeddings
        )


def rope_config(
    config: Any, head_dim: int, context_length: int | None = None, layer_type: str | None = None
) -> RopeConfig:
    """Read a transformers config, whether its rope settings are of version 5 or older.

    Args:
        config: version 5 has ``rope_parameters`` (nested by layer type for Gemma 3), version 4
            ``rope_theta``, ``rope_scaling`` and Gemma 3's ``rope_local_base_freq``.
        context_length: default: the checkpoint's.
        layer_type: ``sliding_attention`` or ``full_attention`` where the two differ.
    """
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        local = layer_type == "sliding_attention"
        theta = config.rope_local_base_freq if local else config.rope_theta
        scaling = None if local else getattr(config, "rope_scaling", None)
        parameters = {"rope_theta": theta, **(scaling or {})}
    elif layer_type is not None and layer_type in parameters:
        parameters = parameters[layer_type]
    parameters = dict(parameters)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if getattr(config, name, None) is not None:
            parameters.setdefault(name, getattr(config, name))
    longest = config.max_position_embeddings
    return RopeConfig(head_dim, parameters, longest, context_length or longest)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions; one instance serves all layers that agree on it."""

    cos_sin: torch.Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.kernels: LayerKernels = TorchKernels()
        frequencies, attention_factor = _frequencies(config)
        angles = torch.outer(torch.arange(config.context_length).float(), frequencies)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
        self.register_buffer("cos_sin", table.float(), persistent=False)
        # [context_length, rotary_dim] float32, cosines then sines: what FlashInfer's kernel takes

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens]; query and key [num_tokens, heads, head_dim], returned rotated. Both may be overwritten."""
        return self.kernels.rotate(positions, query, key, self.cos_sin)


def _frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Radians per position of each rotated pair [rotary_dim / 2], and the factor of cos and sin."""
    rope_type = config.parameters["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(
            f"The checkpoint's rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}."
        )
    return _ROPE_TYPES[rope_type](config)


def _plain(config: RopeConfig, base: float | None = None) -> torch.Tensor:
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2).float() / dim
    return 1.0 / (base or config.parameters["rope_theta"]) ** exponents


def _default(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _plain(config), 1.0


def _linear(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023)."""
    return _plain(config) / config.parameters["factor"], 1.0


def _dynamic(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling. The base follows the served context, not each sequence's length: keys that
    were cached under one base are useless under another."""
    dim, factor = config.rotary_dim, config.parameters["factor"]
    stretch = max(config.context_length, config.max_position_embeddings)
    stretch = factor * stretch / config.max_position_embeddings - (factor - 1)
    return _plain(config, config.parameters["rope_theta"] * stretch ** (dim / (dim - 2))), 1.0


def _llama3(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths interpolated, short ones kept, a ramp between."""
    p, length = config.parameters, config.original_length
    frequencies = _plain(config)
    turns = length * frequencies / (2 * math.pi)  # of each pair over the original context
    kept = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / p["factor"] + kept * frequencies, 1.0


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): as ``_llama3`` with the ramp over feature index, and hotter attention."""
    p, dim, length = config.parameters, config.rotary_dim, config.original_length
    factor = p.get("factor") or config.max_position_embeddings / length

    def index_with_turns(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low = index_with_turns(p.get("beta_fast") or 32)
    high = index_with_turns(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = _plain(config)
    return (
        frequencies / factor * interpolated + frequencies * (1 - interpolated),
        _yarn_attention_factor(p, factor),
    )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): a searched factor for each pair, one set for short contexts, one for long.

    transformers chooses the set by the length of each sequence and recomputes the KV cache when a
    sequence grows past the original context. With a cache that sequences share, the choice must hold
    for all of them: it is made once, by the served context length. So a context length within the
    original one gives the numbers of transformers for every prompt, a longer one gives them for prompts
    past the original context.
    """
    p, length = config.parameters, config.original_length
    scale = p.get("factor") or config.max_position_embeddings / length
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 else 1.0
    factors = p["long_factor"] if config.context_length > length else p["short_factor"]
    return _plain(config) / torch.tensor(factors, dtype=torch.float32), attention_factor


_ROPE_TYPES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
