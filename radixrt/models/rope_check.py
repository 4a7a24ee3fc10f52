"""Checks the rope parameters of a config.json before anything is loaded or allocated for them."""

import math
from collections.abc import Mapping
from typing import Any

from radixrt.base.errors import ConfigError

ROPE_TYPES = (
    "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "su"
)  # fmt: skip
"""The last two are older names of ``default`` with sections and of ``longrope``."""

_POSITIVE = (
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor", "beta_fast", "beta_slow",
)  # fmt: skip


def check_rope(config: Mapping[str, Any]) -> None:
    """Check the rope parameters of a text model's config.

    Raises:
        ConfigError: an unknown type, or a value that gives frequencies that are no numbers.
    """
    _check_positive(config, "rope_theta")
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if not given:
        return
    if not isinstance(given, dict):
        raise _refusal("rope_parameters", given, "is not an object")
    by_layer_type = [one for one in given.values() if isinstance(one, dict)]
    for parameters in by_layer_type or [given]:
        _check_parameters(parameters)


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"The checkpoint's rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}."
        )
    for name in _POSITIVE:
        _check_positive(parameters, name)
    low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
    if low is not None and high is not None and low > high:
        raise _refusal("low_freq_factor", low, f"is above 'high_freq_factor': {high}")
    lengths = {_num_factors(parameters, name) for name in ("short_factor", "long_factor")} - {0}
    if len(lengths) > 1:
        raise _refusal("long_factor", max(lengths), "is not the number of 'short_factor'")


def _num_factors(parameters: Mapping[str, Any], name: str) -> int:
    factors = parameters.get(name)
    if factors is None:
        return 0
    if not (isinstance(factors, list) and factors and all(map(_is_positive, factors))):
        raise _refusal(name, factors, "is not a list of positive numbers")
    return len(factors)


def _check_positive(values: Mapping[str, Any], name: str) -> None:
    if (value := values.get(name)) is not None and not _is_positive(value):
        raise _refusal(name, value, "is not a positive number")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _refusal(name: str, value: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint's config.json has {name!r}: {str(value)[:60]}, which {reason}."
    )
