"""Describes the KV cache of a layer: its tensors, their shapes and dtypes, and the memory that a
token takes in them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radixrt_kernels.attention import SCALE_BYTES

FP8_MAX = 448.0
"""Largest number of float8_e4m3fn; torch converts larger numbers to NaN."""

LayerKV = tuple[Tensor, ...]
"""The KV cache of one layer: for each tensor of its :class:`KVSpec` one of [num_pages, page_size,
*shape]."""


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a layer's KV cache."""

    shape: tuple[int, ...]
    """Shape of one token on this tensor-parallel rank: (num_kv_heads, head_dim) of keys, (1,
    latent_dim) of a latent."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of one layer. The KV pool, its accounting and the attention backends read it;
    the scheduler counts pages and does not know it.

    A layer of 8 KV heads of 128, and a latent of 512 features with a rotated key of 64 (multi-head
    latent attention, DeepSeek-V2, 2024):

    >>> KVSpec.keys_and_values(8, 128, torch.bfloat16).bytes_per_token
    4096
    >>> KVSpec.latents(512, 64, torch.bfloat16).bytes_per_token
    1152
    """

    tensors: tuple[CachedTensor, ...]
    """Tensors in the order of :data:`LayerKV`: keys and values, with their scales behind each head
    where they have any; or one latent; or nothing, if the layer reads the cache of an earlier one
    (Gemma 4) or has no attention."""
    latent_dim: int | None = None
    """Where values are the first features of the one tensor: how many."""

    @staticmethod
    def keys_and_values(
        num_kv_heads: int, head_dim: int, dtype: torch.dtype, v_head_dim: int | None = None
    ) -> "KVSpec":
        """Two tensors: keys of ``head_dim`` features a head, and values of ``v_head_dim`` (default:
        as many).

        In int8 each head has a scale (:mod:`radixrt_kernels.attention`). Of 8 heads of 64, the pool
        holds 1.94 times the tokens:

        >>> of = KVSpec.keys_and_values
        >>> of(8, 64, torch.bfloat16).bytes_per_token / of(8, 64, torch.int8).bytes_per_token
        1.9393939393939394
        """
        scale = SCALE_BYTES if dtype == torch.int8 else 0
        shapes = (
            (num_kv_heads, head_dim + scale),
            (num_kv_heads, (v_head_dim or head_dim) + scale),
        )
        return KVSpec(tuple(CachedTensor(shape, dtype) for shape in shapes))

    @staticmethod
    def latents(latent_dim: int, rope_dim: int, dtype: torch.dtype) -> "KVSpec":
        """One tensor: a latent, and a rotated key of ``rope_dim`` features that all heads share. In
        int8 each of the two has a scale."""
        scales = 2 * SCALE_BYTES if dtype == torch.int8 else 0
        return KVSpec((CachedTensor((1, latent_dim + rope_dim + scales), dtype),), latent_dim)

    @property
    def is_latent(self) -> bool:
        """Whether it is one tensor, whose first features are the values."""
        return self.latent_dim is not None

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether it is keys and values of one shape in ``dtype`` or nothing, as most kernels
        need."""
        if not self.tensors:
            return True
        first = CachedTensor(self.tensors[0].shape, dtype)
        return self.tensors == (first, first)

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token in this layer, on this rank."""
        return sum(math.prod(t.shape) * t.dtype.itemsize for t in self.tensors)

    def __str__(self) -> str:
        tensors = ", ".join(f"{list(t.shape)} {t.dtype}" for t in self.tensors)
        return f"{len(self.tensors)} tensors a token ({tensors})"


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values for a value of ``--kv-cache-dtype``, in a model that computes in
    ``dtype``.

    >>> kv_dtype("auto", torch.bfloat16), kv_dtype("fp8_e4m3", torch.bfloat16)
    (torch.bfloat16, torch.float8_e4m3fn)
    """
    return {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(name, dtype)


def to_kv_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in the dtype of the KV cache; numbers beyond the range of 8-bit floats become the
    largest of these."""
    if dtype == torch.float8_e4m3fn:
        tensor = tensor.clamp(-FP8_MAX, FP8_MAX)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
