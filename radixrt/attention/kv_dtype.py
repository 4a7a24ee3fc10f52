"""In which type does the KV cache hold keys and values?"""

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest number of float8_e4m3fn; torch turns what is larger into NaN."""


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What a value of ``--kv-cache-dtype`` means where activations are of ``dtype``."""
    return torch.float8_e4m3fn if name == "fp8_e4m3" else dtype


def to_kv_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as the cache holds them."""
    if dtype == torch.float8_e4m3fn:
        tensor = tensor.clamp(-FP8_MAX, FP8_MAX)
    return tensor.to(dtype)
